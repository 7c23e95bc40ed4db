"""Makes a torchvision importable whose operators do not load.

torchvision registers a fake for operators such as nms, and that fails for one that is not declared.
So this module declares them just before. Every interpreter of SGLang's reads it at its start.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class _Finder:
    """An import hook that finds no module, but is called before every import."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Declare the operators when torchvision is about to register their fakes."""
        if name == "torchvision._meta_registrations":
            import torch

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{operator}", signature)

        return None


def _the_other_one():
    """Run the sitecustomize that this one hides, if the environment has one."""
    folder = str(Path(__file__).parent)
    others = [entry for entry in sys.path if entry != folder]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder)
_the_other_one()
