"""Who holds which part of which parameter: the language that training backends and rollout engines share.

Canonical names and shapes are those of the exported safetensors (Hugging Face).
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch


@attrs.frozen
class Box:
    """A half-open interval of an n-dimensional parameter, in elements: start[i] <= index[i] < stop[i]."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def full(cls, shape) -> Box:
        return cls((0,) * len(shape), tuple(int(s) for s in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= max(size, 0)
        return n

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


@attrs.frozen
class Param:
    """The whole of a parameter: its canonical shape and the dtype that this side stores."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return Box.full(self.shape).numel * self.dtype.itemsize


@attrs.frozen
class WeightLayout:
    """Which boxes of each parameter each rank holds; `()` (nothing) is a legal holding."""

    params: Mapping[str, Param]
    held: Mapping[int, Mapping[str, tuple[Box, ...]]]
    """rank -> canonical name -> boxes."""
    ties: Mapping[str, str] = attrs.field(factory=dict)
    """Tied name -> the name whose storage it shares; tied names are not in `params`."""
