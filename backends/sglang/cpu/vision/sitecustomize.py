"""Lets a torchvision without loadable operators be imported: it registers a fake for an operator that is not there, so the
operator is declared just before it does so. Read by every interpreter of SGLang's, at its start."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            import torch

            for op in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, op):
                    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{op}", signature)
        return None


def _the_other_one():
    """The sitecustomize that this one hides, if the environment has one."""
    here = str(Path(__file__).parent)
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != here])
    if spec is not None and spec.loader is not None:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder)
_the_other_one()
