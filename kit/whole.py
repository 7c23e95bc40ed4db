"""For engines that take whole parameters alone.

Boxes are put together, and a parameter is handed over as soon as it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import gt
from typing import Any

import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.arrivals import Arrivals
from hybridflow.kit.huggingface.models import saved_parameters

Load = Callable[[str, torch.Tensor], None]
"""Hands over a whole parameter: (name, values)."""


class WholeParameters:
    """Collects the boxes of a weight update.

    `load(name, values)` gets each parameter once it is whole, in the order in which they become so.
    `values` is a copy, which is the loader's own.
    """

    def __init__(
        self,
        params: Mapping[str, Param],
        ties: Mapping[str, str],
        device: torch.device,
        load: Load,
    ):
        self.params = dict(params)
        self.ties = dict(ties)
        self.device = device
        self.load = load
        self._held = {name: (Box.full(param.shape),) for name, param in self.params.items()}
        self.begin()

    @classmethod
    def of(
        cls,
        hf_config: Any,
        dtype: str,
        device: torch.device,
        load: Load,
    ) -> WholeParameters:
        """Collect the parameters of a Hugging Face model, as `dtype` ("float32", "bfloat16")."""
        shapes, ties = saved_parameters(hf_config)
        torch_dtype = getattr(torch, dtype)
        params = {name: Param(shape, torch_dtype) for name, shape in shapes.items()}
        return cls(params, ties, device, load)

    def layout(self, ranks: int) -> WeightLayout:
        """Return a layout in which every rank holds everything, and gives no view of it."""
        by_rank = dict.fromkeys(range(ranks), self._held)
        return WeightLayout(self.params, by_rank, self.ties, frozenset(self.params))

    def begin(self) -> None:
        """Begin an update; parts of an earlier one that was not ended are dropped."""
        self.arrived = Arrivals(self._held)
        self._parts: dict[str, torch.Tensor] = {}
        """Parameters of which a part has arrived."""

    @torch.no_grad()
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Add a box of a parameter.

        Raises HybridFlowError for a name or shape that is not of this model, and for elements that
        have come before.
        """
        check_box(self.params, self.ties, name, box, tensor)
        self.arrived.note(name, box)
        param = self.params[name]

        # The caller may use the memory of its tensor again.
        if box == Box.full(param.shape):
            self.load(name, tensor.to(self.device, copy=True))
            return

        # A part: copy it to its place, and hand the parameter over with the last one.
        if name not in self._parts:
            empty = torch.empty(param.shape, dtype=param.dtype, device=self.device)
            self._parts[name] = empty
        self._parts[name][box.slices()].copy_(tensor)
        if self.arrived.whole(name):
            self.load(name, self._parts.pop(name))

    def end(self) -> None:
        """End the update. Raises HybridFlowError where a part of a parameter is missing."""
        self.arrived.check()


def check_box(
    params: Mapping[str, Param],
    ties: Mapping[str, str],
    name: str,
    box: Box,
    tensor: torch.Tensor,
) -> None:
    """Raise HybridFlowError for a name or shape that is not of the model."""
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
