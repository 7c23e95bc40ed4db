"""The registry's torchvision is a CUDA build: on CPU torch its C++ ops do not load, and torchvision then fails
at import because it registers a fake for an op that is not there. Declare that op just before it does so."""

import sys


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            import torch

            for op in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, op):
                    torch.library.define(
                        f"torchvision::{op}",
                        "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                    )
        return None


sys.meta_path.insert(0, _Finder)
