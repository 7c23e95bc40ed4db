"""A stand-in for SGLang's kernels on machines without a GPU: its modules import names of it, and call none there."""

__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing
