"""Auto-mapping: which models share which devices, in which layouts, and how long a step takes.

Each name is imported when it is first used; __init__.pyi lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
