"""The storage of this rank's part of each canonical parameter, and its updates.

Fused projections hold several parameters in one storage, with rows in the decoder's order:

    k_proj (canonical)   row 0, row 1, row 2, ...
                           |      |      |          place.rows = [8, 10, 9, ...]
    storage of qkv       row 8, row 10, row 9, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import attrs
import torch

from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.arrivals import Arrivals

BLOCK_ROWS = 64
"""Rows that are transposed at once."""


@attrs.frozen(eq=False)
class StoredBox:
    """A box of a canonical parameter inside a storage tensor, which may hold others too."""

    storage: torch.Tensor
    """The tensor whose rows hold the box."""
    rows: torch.Tensor | None
    """The row of `storage` that holds each row of the box, int64, on the host; None if `storage`
    is the box."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    held: Box
    """The box of the parameter that the storage holds."""

    @classmethod
    def whole(cls, storage: torch.Tensor) -> StoredBox:
        """Return the place of a whole parameter with a storage of its own."""
        return cls(storage, None, tuple(storage.shape), Box.full(storage.shape))

    def view(self, box: Box) -> torch.Tensor | None:
        """Return the storage of a box, or None where rows are reordered."""
        if self.rows is not None:
            return None
        return self.storage[box.within(self.held)]

    def read(self, box: Box) -> torch.Tensor:
        """Return the values of a box in canonical order; a copy where there is no view."""
        if self.rows is None:
            return self.storage[box.within(self.held)]
        first, *others = box.within(self.held)
        columns = self.storage[(slice(None), *others)]
        return columns.index_select(0, self.rows[first].to(columns.device))

    def write(self, box: Box, tensor: torch.Tensor) -> None:
        """Copy `tensor`, the values of `box`, with a cast to the storage's dtype and device."""
        first, *others = box.within(self.held)
        columns = self.storage[(slice(None), *others)]
        if self.rows is None:
            _copy(columns[first], tensor)
            return

        # Rows are consecutive in few runs, within which a copy is quick.
        rows, order = self.rows[first].sort()
        values = tensor.to(columns.device).index_select(0, order.to(columns.device))
        start = 0
        for length in _runs(rows):
            _copy(columns.narrow(0, int(rows[start]), length), values.narrow(0, start, length))
            start += length


def _runs(rows: torch.Tensor) -> list[int]:
    """Return the lengths of runs of consecutive numbers."""
    # A run ends where the next number is not the next.
    ends = torch.nonzero(rows.diff() != 1).flatten() + 1
    edges = [0, *ends.tolist(), len(rows)]
    return [stop - start for start, stop in pairwise(edges)]


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy with a cast; into transposed memory in blocks that fit into the CPU's cache."""
    if target.dim() != 2 or target.stride(0) != 1 or target.device.type != "cpu":
        target.copy_(values)
        return
    for start in range(0, len(values), BLOCK_ROWS):
        block = values[start : start + BLOCK_ROWS]
        block = block.to(device=target.device, dtype=target.dtype)
        # Torch transposes into contiguous memory quickly, and otherwise element by element.
        target[start : start + BLOCK_ROWS].t().copy_(block.t().contiguous())


class WeightStore:
    """All places of a model, and the boxes that have arrived in the present update."""

    def __init__(
        self,
        places: Mapping[str, StoredBox],
        ties: Mapping[str, str],
        split: Split = WHOLE,
    ):
        self.places = dict(places)
        self.ties = ties
        self.split = split
        self._lent: set[str] = set()
        """Parameters whose storage is shared with the trainer."""
        self.begin()

        # Fused projections share a storage, whose memory is dropped and restored once.
        storages = [place.storage.untyped_storage() for place in self.places.values()]
        unique = {storage.data_ptr(): storage for storage in storages}
        self._storages = [(storage, storage.nbytes()) for storage in unique.values()]

    def layout(self) -> WeightLayout:
        """Return the boxes that every rank of the actor holds."""
        params = {}
        reordered = []
        for name, place in self.places.items():
            params[name] = Param(place.shape, place.storage.dtype)
            if place.rows is not None:
                reordered.append(name)
        return self.split.layout(params, self.ties, reordered)

    def begin(self) -> None:
        """Begin an update of all parameters that are not lent to the trainer."""
        places = self.places.items()
        self.arrived = Arrivals(
            {name: (place.held,) for name, place in places if name not in self._lent}
        )

    @torch.no_grad()
    def receive(
        self,
        name: str,
        box: Box,
        tensor: torch.Tensor,
    ) -> None:
        """Copy the values of a box.

        Raises HybridFlowError for an unknown name, a box that this rank does not hold, a tensor of
        another shape, or elements that have arrived before.
        """
        place = self._place(name, box)
        if tuple(tensor.shape) != box.shape:
            raise HybridFlowError(
                f"{name}: got a tensor of shape {tuple(tensor.shape)} for the box {box.start} to "
                f"{box.stop}, which has shape {box.shape}"
            )
        self.arrived.note(name, box)
        place.write(box, tensor)

    def lend(self, name: str) -> None:
        """Mark a parameter as lent to the trainer: `drop` keeps its memory, updates omit it."""
        self._lent.add(name)

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """Return the storage of a box, or None where rows are reordered."""
        return self._place(name, box).view(box)

    @torch.no_grad()
    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values of a box in canonical order; a copy where there is no view."""
        return self._place(name, box).read(box)

    def _place(self, name: str, box: Box) -> StoredBox:
        """Return a parameter's place; raises HybridFlowError if this rank does not hold `box`."""
        # The message says whether the name is wrong, or the box on all ranks, or only on this one.
        place = self.places.get(name)
        if place is None:
            raise HybridFlowError(self._unknown(name))

        outside = f"{name}: the box {box.start} to {box.stop} does not lie in"
        if not _inside(box, Box.full(place.shape)):
            raise HybridFlowError(f"{outside} the shape {place.shape}")
        if not _inside(box, place.held):
            raise HybridFlowError(
                f"{outside} what tensor-parallel rank {self.split.at} of {self.split.tp} holds: "
                f"{place.held.start} to {place.held.stop}"
            )
        return place

    def end(self) -> None:
        """End an update. Raises HybridFlowError where elements are missing."""
        self.arrived.check()

    def drop(self) -> None:
        """Free the memory of parameters that are not lent; places and views stay valid objects.

        `restore` gives them memory again, with undefined values.
        """
        lent = set()
        for name in self._lent:
            storage = self.places[name].storage.untyped_storage()
            lent.add(storage.data_ptr())

        # Parameters that share memory with a lent one are kept too.
        for storage, _ in self._storages:
            if storage.data_ptr() not in lent:
                storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory that `drop` freed."""
        for storage, nbytes in self._storages:
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)

    def _unknown(self, name: str) -> str:
        """Return the message for a name that has no place."""
        # A tied parameter is known, but under its source's name.
        if name in self.ties:
            return f"{name} is tied to {self.ties[name]}; send that one alone"

        from difflib import get_close_matches

        near = get_close_matches(name, self.places, 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        return f"the rollout model has no parameter {name!r}{hint}"


def _inside(box: Box, outer: Box) -> bool:
    """Return whether a box lies in another one, with equally many axes."""
    if len(box.start) != len(outer.start):
        return False
    edges = zip(outer.start, box.start, box.stop, outer.stop, strict=True)
    return all(first <= start <= stop <= last for first, start, stop, last in edges)
