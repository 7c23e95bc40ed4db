"""Checksums of the values in the windows into which boxes were copied.

wanted box of a parameter
  |- in one window               its checksum counts
  `- in two (a tied head, say)   counts once; where the second one differs, the sum is wrong
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from hybridflow.core.contracts.rollout import Wanted
from hybridflow.core.values.checksum import checksum, totals
from hybridflow.core.values.weights import Box
from hybridflow.kit.tracing.windows import Piece, Window


@attrs.frozen
class _Place:
    """A part of a parameter in a window."""

    name: str
    part: Box
    window: Window
    own: Box
    """The box whose values the window holds; the part lies in it."""
    first: bool
    """Whether no window before this one has the part."""


class WindowSums:
    """Adds up checksums of the boxes that a proof is about, from the tensors that hold them.

    A tensor is read while it has the received values: before the engine packs or scales them.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Piece]]):
        self.wanted: Wanted = {}
        self._places: dict[str, list[_Place]] = {}
        """The parts in each tensor, by its name."""
        self._sums: dict[tuple[str, Box, Window], torch.Tensor] = {}
        self._again: list[tuple[str, Box, Window]] = []
        """Sums of the values that another window also holds."""
        # A tensor is read by its name; it may hold several parameters.
        for name, own_pieces in pieces.items():
            for place in _places_of(name, own_pieces):
                self._places.setdefault(place.window.tensor, []).append(place)

    def expect(self, wanted: Wanted) -> None:
        """Reset the sums, for these boxes."""
        self.wanted = wanted
        self._sums.clear()
        self._again.clear()

    def look(self, tensor_name: str, tensor: torch.Tensor) -> None:
        """Add up the values of the wanted boxes in a tensor."""
        for place in self._places.get(tensor_name, ()):
            dtype, boxes = self.wanted.get(place.name, (tensor.dtype, ()))
            for box in boxes:
                common = box.intersect(place.part)
                if common is None:
                    continue
                # In the dtype of the wire, as the sender adds up.
                key = (place.name, common, place.window)
                values = place.window.of(tensor)[common.within(place.own)]
                self._sums[key] = checksum(values.to(dtype), common)
                if not place.first:
                    self._again.append(key)

    def totals(self) -> dict[str, int]:
        """Return the checksum of each parameter with wanted boxes in the tensors read so far."""
        return totals(self._counted())

    def _counted(self) -> Iterator[tuple[str, torch.Tensor]]:
        again = set(self._again)
        first: dict[tuple[str, Box], torch.Tensor] = {}
        # Values in one window count once.
        for key, value in self._sums.items():
            if key not in again:
                first[key[:2]] = value
                yield key[0], value
        # Equal values add nothing; three times, lest a first window's own error be taken back.
        for key in again:
            if key[:2] in first:
                yield key[0], 3 * (self._sums[key] - first[key[:2]])


def _places_of(name: str, pieces: Sequence[Piece]) -> Iterator[_Place]:
    """Yield the parts of a parameter's windows: each element once, and repeated windows too."""
    seen: list[Box] = []
    for own, window in pieces:
        if own in seen:
            yield _Place(name, own, window, own, first=False)
            continue
        # Only what no earlier window has is new.
        rest = [own]
        for other in seen:
            rest = [part for one in rest for part in one.minus(other)]
        for part in rest:
            yield _Place(name, part, window, own, first=True)
        seen.append(own)
