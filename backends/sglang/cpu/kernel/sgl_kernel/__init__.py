"""A stand-in for SGLang's kernels on machines without a GPU.

SGLang's modules import names of it on such machines, but call none of them.
"""

__version__ = "0.0.0"


def __getattr__(name):
    # Python itself asks modules for optional names such as __path__, which must be missing.
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing
