"""For engines that take whole parameters alone: boxes are put together, and handed over as soon as one is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.huggingface.models import saved_parameters

Load = Callable[[str, torch.Tensor], None]


class WholeParameters:
    """The account of an update. `load(name, values)` gets each parameter once it is whole, in whatever order that is.

    `values` is what was received, or put together here; it stays as it is until the update ends.
    """

    def __init__(
        self, params: Mapping[str, Param], ties: Mapping[str, str], device: torch.device, load: Load
    ):
        self.params, self.ties, self.device, self.load = dict(params), dict(ties), device, load
        self.complete = False
        """Whether every parameter has arrived, in this update or an earlier one."""
        self._parts: dict[str, torch.Tensor] = {}
        self._lacks: dict[str, int] = {}
        self._loaded: set[str] = set()

    @classmethod
    def of(cls, hf_config: Any, dtype: str, device: torch.device, load: Load) -> WholeParameters:
        """For every parameter of a Hugging Face model, stored as `dtype` ("float32", "bfloat16")."""
        shapes, ties = saved_parameters(hf_config)
        params = {name: Param(shape, getattr(torch, dtype)) for name, shape in shapes.items()}
        return cls(params, ties, device, load)

    def layout(self, ranks: int) -> WeightLayout:
        """Every rank holds everything, and gives no view of it."""
        held = {name: (Box.full(p.shape),) for name, p in self.params.items()}
        return WeightLayout(
            self.params, dict.fromkeys(range(ranks), held), self.ties, frozenset(self.params)
        )

    def begin(self) -> None:
        self._parts.clear()
        self._lacks.clear()
        self._loaded.clear()

    @torch.no_grad()
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Boxes of a parameter do not overlap. Raises HybridFlowError for what is not of this model."""
        param = self.params.get(name)
        if param is None:
            if name in self.ties:
                raise HybridFlowError(f"{name} is tied to {self.ties[name]}; send that one alone")
            raise HybridFlowError(f"the rollout model has no parameter {name!r}")
        full = Box.full(param.shape)
        if tuple(tensor.shape) != box.shape or any(
            b > s for b, s in zip(box.stop, param.shape, strict=True)
        ):
            raise HybridFlowError(
                f"{name} has shape {param.shape}; got a tensor of shape {tuple(tensor.shape)} for the box {box.start} to "
                f"{box.stop}"
            )
        if box == full:
            self._hand_over(name, tensor.to(self.device))
            return
        if name not in self._parts:
            self._parts[name] = torch.empty(param.shape, dtype=param.dtype, device=self.device)
            self._lacks[name] = full.numel
        self._parts[name][box.slices()].copy_(tensor)
        self._lacks[name] -= box.numel
        if not self._lacks[name]:
            self._hand_over(name, self._parts.pop(name))

    def _hand_over(self, name: str, whole: torch.Tensor) -> None:
        self.load(name, whole)
        self._loaded.add(name)
        self._lacks.pop(name, None)

    def end(self) -> None:
        """Raises HybridFlowError when a parameter is half here, or one has never arrived."""
        if self._lacks:
            names = ", ".join(
                f"{n} ({self.params[n].numel - lacks} elements)" for n, lacks in self._lacks.items()
            )
            raise HybridFlowError(f"the weight update brought only a part of {names}")
        missing = [name for name in self.params if name not in self._loaded]
        if missing and not self.complete:
            raise HybridFlowError(
                f"the first weight update lacks {len(missing)} of {len(self.params)} parameters: {', '.join(missing)}"
            )
        self.complete = True
