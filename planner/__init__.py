"""Auto-mapping: which models share which devices, in which layouts, how long a step takes and whether it fits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
