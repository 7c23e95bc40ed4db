"""Where this rank's part of each canonical parameter lies in the engine's storage, and what of it has arrived."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param, WeightLayout


@attrs.frozen(eq=False)
class Place:
    """A box of a canonical parameter inside a storage tensor, which may hold others too (fused projections)."""

    storage: torch.Tensor
    rows: torch.Tensor | None
    """int64: the row of `storage` that holds each row of the box; None: `storage` is the box."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    held: Box
    """What is here of it."""

    @classmethod
    def whole(cls, storage: torch.Tensor) -> Place:
        """A parameter with a storage of its own."""
        return cls(storage, None, tuple(storage.shape), Box.full(storage.shape))

    def view(self, box: Box) -> torch.Tensor | None:
        """The storage of a box, or None where rows are reordered."""
        return self.storage[box.within(self.held)] if self.rows is None else None

    def read(self, box: Box) -> torch.Tensor:
        """The values of a box in canonical order; a copy where there is no view."""
        if self.rows is None:
            return self.storage[box.within(self.held)]
        first, *others = box.within(self.held)
        return self.storage[(slice(None), *others)].index_select(0, self.rows[first])

    def write(self, box: Box, tensor: torch.Tensor) -> None:
        """Copy `tensor` (the values of `box`) in, with a cast to the storage's dtype and device."""
        first, *others = box.within(self.held)
        if self.rows is None:
            self.storage[(first, *others)].copy_(tensor)
            return
        target = self.storage[(slice(None), *others)]
        target.index_copy_(0, self.rows[first], tensor.to(device=target.device, dtype=target.dtype))


class WeightStore:
    """All places of a model, and the account of an update: which boxes of which parameter were received."""

    def __init__(self, places: Mapping[str, Place], ties: Mapping[str, str], split: Split = WHOLE):
        self.places, self.ties, self.split = dict(places), dict(ties), split
        self.complete = False
        self._received: dict[str, dict[Box, int]] = {}
        storages = [place.storage.untyped_storage() for place in self.places.values()]
        unique = {storage.data_ptr(): storage for storage in storages}
        self._storages = [(storage, storage.nbytes()) for storage in unique.values()]
        self._lent: set[str] = set()

    def layout(self) -> WeightLayout:
        """What every rank of the actor has."""
        params = {
            name: Param(place.shape, place.storage.dtype) for name, place in self.places.items()
        }
        reordered = [name for name, place in self.places.items() if place.rows is not None]
        return self.split.layout(params, self.ties, reordered)

    def begin(self) -> None:
        self._received = {}

    @torch.no_grad()
    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Raises HybridFlowError for an unknown name, a box outside what is here, or a tensor of another shape."""
        place = self._place(name, box)
        if tuple(tensor.shape) != box.shape:
            raise HybridFlowError(
                f"{name}: got a tensor of shape {tuple(tensor.shape)} for the box {box.start} to {box.stop}, "
                f"which has shape {box.shape}"
            )
        place.write(box, tensor)
        self._received.setdefault(name, {})[box] = box.numel

    def lend(self, name: str) -> None:
        self._lent.add(name)

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        return self._place(name, box).view(box)

    @torch.no_grad()
    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._place(name, box).read(box)

    def _place(self, name: str, box: Box) -> Place:
        """Where a parameter lies; raises HybridFlowError if `box` of it does not lie here."""
        place = self.places.get(name)
        if place is None:
            raise HybridFlowError(self._unknown(name))
        said = f"{name}: the box {box.start} to {box.stop} does not lie in"
        if not _inside(box, Box.full(place.shape)):
            raise HybridFlowError(f"{said} the shape {place.shape}")
        if not _inside(box, place.held):
            raise HybridFlowError(
                f"{said} what tensor-parallel rank {self.split.at} of {self.split.tp} holds: {place.held.start} to "
                f"{place.held.stop}"
            )
        return place

    def end(self) -> None:
        """After the first update every element must have arrived; later ones may bring a part."""
        if self.complete:
            return
        missing = [
            f"{name} ({got} of {want} elements)" if got else name
            for name, place in self.places.items()
            if (got := sum(self._received.get(name, {}).values())) < (want := place.held.numel)
            and name not in self._lent
        ]
        if missing:
            raise HybridFlowError(
                f"the first weight update lacks {len(missing)} of {len(self.places)} parameters: {', '.join(missing)}"
            )
        self.complete = True

    def drop(self) -> None:
        """Give the memory back; places and views stay, `restore` gives them (undefined) memory again."""
        self.complete = False
        lent = {self.places[name].storage.untyped_storage().data_ptr() for name in self._lent}
        for storage, _ in self._storages:
            if storage.data_ptr() not in lent:
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
        return f"the rollout model has no parameter {name!r}" + (
            f"; the nearest is {near[0]!r}" if near else ""
        )


def _inside(box: Box, outer: Box) -> bool:
    return len(box.start) == len(outer.start) and all(
        first <= a <= b <= last
        for a, b, first, last in zip(box.start, box.stop, outer.start, outer.stop, strict=True)
    )
