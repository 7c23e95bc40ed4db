"""Where each canonical parameter lies in the engine's storage, and what of it has arrived."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.weights import Box, Param, WeightLayout


@attrs.frozen(eq=False)
class Place:
    """A canonical parameter inside a storage tensor, which may hold others too (fused projections)."""

    storage: torch.Tensor
    rows: torch.Tensor | None = None
    """int64 [shape[0]]: the row of `storage` that holds each canonical row; None: `storage` is the parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.storage.shape[0] if self.rows is None else self.rows.shape[0]
        return (first, *self.storage.shape[1:])

    def write(self, box: Box, tensor: torch.Tensor) -> None:
        """Copy `tensor` (the values of `box`) in, with a cast to the storage's dtype and device."""
        if self.rows is None:
            self.storage[box.slices()].copy_(tensor)
            return
        first, *others = box.slices()
        target = self.storage[(slice(None), *others)]
        target.index_copy_(0, self.rows[first], tensor.to(device=target.device, dtype=target.dtype))


class WeightStore:
    """All places of a model, and the account of an update: which boxes of which parameter were received."""

    def __init__(self, places: Mapping[str, Place], ties: Mapping[str, str]):
        self.places, self.ties = dict(places), dict(ties)
        self.complete = False
        self._received: dict[str, dict[Box, int]] = {}
        storages = [place.storage.untyped_storage() for place in self.places.values()]
        unique = {storage.data_ptr(): storage for storage in storages}
        self._storages = [(storage, storage.nbytes()) for storage in unique.values()]

    def layout(self) -> WeightLayout:
        params = {name: Param(place.shape, place.storage.dtype) for name, place in self.places.items()}
        held = {name: (Box.full(place.shape),) for name, place in self.places.items()}
        return WeightLayout(params=params, held={0: held}, ties=self.ties)

    def begin(self) -> None:
        self._received = {}

    @torch.no_grad()
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Raises HybridFlowError for an unknown name, a box outside the parameter, or a tensor of another shape."""
        place = self.places.get(name)
        if place is None:
            raise HybridFlowError(self._unknown(name))
        shape = place.shape
        fits = len(box.start) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)
        )
        if not fits:
            raise HybridFlowError(f"{name}: the box {box.start} to {box.stop} does not lie in the shape {shape}")
        if tuple(tensor.shape) != box.shape:
            raise HybridFlowError(
                f"{name}: got a tensor of shape {tuple(tensor.shape)} for the box {box.start} to {box.stop}, "
                f"which has shape {box.shape}"
            )
        place.write(box, tensor)
        self._received.setdefault(name, {})[box] = box.numel

    def end(self) -> None:
        """After the first update every element must have arrived; later ones may bring a part."""
        if self.complete:
            return
        missing = [
            f"{name} ({got} of {want} elements)" if got else name
            for name, place in self.places.items()
            if (got := sum(self._received.get(name, {}).values())) < (want := Box.full(place.shape).numel)
        ]
        if missing:
            raise HybridFlowError(
                f"the first weight update lacks {len(missing)} of {len(self.places)} parameters: {', '.join(missing)}"
            )
        self.complete = True

    def drop(self) -> None:
        """Give the memory back; places and views stay, `restore` gives them (undefined) memory again."""
        self.complete = False
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, nbytes in self._storages:
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)

    def _unknown(self, name: str) -> str:
        if name in self.ties:
            return f"{name} is tied to {self.ties[name]}; send that one alone"
        from difflib import get_close_matches

        near = get_close_matches(name, self.places, 1)
        return f"the rollout model has no parameter {name!r}" + (f"; the nearest is {near[0]!r}" if near else "")
