"""From a TOML file to a finished run: settings are settled, then the run stages run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
