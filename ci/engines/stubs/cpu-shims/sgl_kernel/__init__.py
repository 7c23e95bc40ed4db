"""Import stub: pure-torch stand-ins for the few names SGLang imports on CPU."""

__version__ = "0.0.0"
CALLS = {}


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*a, **k):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    missing.__name__ = name
    return missing
