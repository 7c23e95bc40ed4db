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
        self.complete = False
        """Whether every parameter has arrived, in this update or an earlier one."""
        self._parts: dict[str, torch.Tensor] = {}
        """Parameters of which a part has arrived in this update."""
        self._lacks: dict[str, int] = {}
        """The number of elements that each of these lacks."""
        self._loaded: set[str] = set()
        """Parameters that this update has handed over."""

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
        held = {}
        for name, param in self.params.items():
            held[name] = (Box.full(param.shape),)

        by_rank = dict.fromkeys(range(ranks), held)
        return WeightLayout(self.params, by_rank, self.ties, frozenset(self.params))

    def begin(self) -> None:
        """Begin an update; parts of an earlier one that was not ended are dropped."""
        self._parts.clear()
        self._lacks.clear()
        self._loaded.clear()

    @torch.no_grad()
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Add a box of a parameter; boxes of one update do not overlap.

        Raises HybridFlowError for a name or shape that is not of this model.
        """
        check_box(self.params, self.ties, name, box, tensor)
        param = self.params[name]
        full = Box.full(param.shape)

        # The caller may use the memory of its tensor again.
        if box == full:
            self._hand_over(name, tensor.to(self.device, copy=True))
            return

        # A part: copy it to its place, and hand the parameter over with the last one.
        if name not in self._parts:
            empty = torch.empty(param.shape, dtype=param.dtype, device=self.device)
            self._parts[name] = empty
            self._lacks[name] = full.numel
        self._parts[name][box.slices()].copy_(tensor)
        self._lacks[name] -= box.numel
        if not self._lacks[name]:
            self._hand_over(name, self._parts.pop(name))

    def _hand_over(self, name: str, whole: torch.Tensor) -> None:
        """Load a whole parameter and note it."""
        self.load(name, whole)
        self._loaded.add(name)
        self._lacks.pop(name, None)

    def brought(self, name: str) -> bool:
        """Return whether the last update has handed over this parameter."""
        return name in self._loaded

    def end(self) -> None:
        """End the update. A later update may bring some of the parameters alone.

        Raises HybridFlowError when a part of a parameter lacks, or one has never arrived.
        """
        # What has begun to arrive must arrive in full.
        if self._lacks:
            parts = []
            for name, lacks in self._lacks.items():
                parts.append(f"{name} ({self.params[name].numel - lacks} elements)")
            raise HybridFlowError(f"the weight update brought only a part of {', '.join(parts)}")

        # Parameters of an earlier update stay; only the first one must bring them all.
        missing = [name for name in self.params if name not in self._loaded]
        if missing and not self.complete:
            raise HybridFlowError(
                f"the first weight update lacks {len(missing)} of {len(self.params)} parameters: "
                f"{', '.join(missing)}"
            )
        self.complete = True


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
