"""Bookkeeping of a weight update: which elements of a rank's boxes have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import gt

import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param


class Arrivals:
    """Counts the elements of boxes in one update: every element must arrive, and once.

    Boxes outside those that the rank holds are ignored.
    """

    def __init__(self, held: Mapping[str, Sequence[Box]]):
        """`held`: the boxes of each parameter that the rank holds; they do not overlap."""
        self.held = held
        self._lacks: dict[str, int] = {}
        """Parameter -> the number of elements that have not arrived."""
        for name, boxes in held.items():
            if elements := sum(box.numel for box in boxes):
                self._lacks[name] = elements
        self._came: dict[str, list[Box]] = {}

    def note(self, name: str, box: Box) -> bool:
        """Note the elements of a box; return whether they complete its parameter on this rank.

        Raises HybridFlowError where some of them have arrived before.
        """
        if name not in self._lacks:
            return False
        before = self._lacks[name]
        came = self._came.setdefault(name, [])
        for own in self.held[name]:
            common = box.intersect(own)
            if common is None:
                continue
            if any(common.intersect(earlier) is not None for earlier in came):
                raise HybridFlowError(
                    f"the weight update brought elements of {name} twice: the box {common.start} "
                    f"to {common.stop}"
                )
            came.append(common)
            self._lacks[name] -= common.numel
        return before > 0 and not self._lacks[name]

    def whole(self, name: str) -> bool:
        """Return whether all elements of a parameter that the rank holds have arrived."""
        return not self._lacks.get(name)

    def check(self) -> None:
        """Raise HybridFlowError if elements of any parameter are missing."""
        missing = []
        for name, lacks in self._lacks.items():
            if lacks:
                elements = sum(box.numel for box in self.held[name])
                some = f" ({elements - lacks} of {elements} elements came)"
                missing.append(f"{name}{some if lacks < elements else ''}")
        if missing:
            raise HybridFlowError(
                f"the weight update lacks {len(missing)} of {len(self._lacks)} parameters: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            )


def check_box(
    params: Mapping[str, Param],
    ties: Mapping[str, str],
    name: str,
    box: Box,
    tensor: torch.Tensor,
) -> None:
    """Raise HybridFlowError for a name or shape that the model does not have."""
    # A tied parameter has no values of its own.
    param = params.get(name)
    if param is None:
        if name in ties:
            raise HybridFlowError(f"{name} is tied to {ties[name]}; send that one alone")
        raise HybridFlowError(f"the rollout model has no parameter {name!r}")

    # The box must have the tensor's shape, and lie inside the parameter.
    full = Box.full(param.shape)
    fits = tuple(tensor.shape) == box.shape
    if not fits or any(map(gt, box.stop, full.stop)):
        raise HybridFlowError(
            f"{name} has shape {param.shape}; got a tensor of shape {tuple(tensor.shape)} "
            f"for the box {box.start} to {box.stop}"
        )
