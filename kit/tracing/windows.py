"""Windows: where boxes of a parameter lie in another tensor's storage.

A view of a contiguous tensor is cut into boxes of it, and each box goes to a strided window:

    parameter [4, 6]          tensor of an engine [2, 4]
    . . a b . .               a b | a' b'     a window per box; the strides are the tensor's own
    . . c d . .      ---->    c d | c' d'
    . . . . . .
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from math import prod

import attrs
import torch

from hybridflow.core.values.weights import Box

MOST_PIECES = 4096
"""The most boxes of a view; one that needs more raises NoBoxError."""


@attrs.frozen
class Window:
    """A strided part of a tensor, with the dimensions of the box whose values it holds."""

    tensor: str
    """Name of the tensor."""
    offset: int
    """Its first element, counted from the tensor's own first one."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements from one index to the next, along each dimension."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the window as a view of the tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


Piece = tuple[Box, Window]
"""A box of a parameter, and the window that takes its values."""


class NoBoxError(ValueError):
    """A view shows elements that are no box of the tensor."""


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def pieces_of_view(
    shape: Sequence[int], view: torch.Tensor, tensor: str, offset: int, stride: Sequence[int]
) -> list[Piece]:
    """Cut a view of a contiguous tensor of `shape` into boxes, each with its window.

    The view's elements go to the window of `tensor` at `offset` with the strides `stride`. Raises
    NoBoxError where they do not form boxes.
    """
    strides = strides_of(shape)
    start = int(view.storage_offset())
    first = _index(start, strides, shape)
    runs = _runs(view, stride)

    # From the innermost run on, each fills dimensions of the tensor. A run that fills none (a step
    # over every second row, say) makes a box for each of its indexes.
    extents: dict[int, tuple[int, int]] = {}  # dimension -> (elements, stride in the window)
    steps: list[tuple[int, int, int]] = []
    for count, source, target in reversed(runs):
        step = _fill(extents, count, source, target, shape, strides, first)
        if step is not None:
            steps.append(step)
    if prod(count for count, _, _ in steps) > MOST_PIECES:
        raise NoBoxError(f"it falls into more than {MOST_PIECES} boxes")

    # All boxes have one size; each begins where the indexes of the steps lead.
    sizes = tuple(extents.get(dim, (1, 1))[0] for dim in range(len(shape)))
    window_strides = tuple(extents.get(dim, (1, 1))[1] for dim in range(len(shape)))
    pieces = []
    for indexes in product(*(range(count) for count, _, _ in steps)):
        begin = start
        shift = 0
        for index, (_, source, target) in zip(indexes, steps, strict=True):
            begin += index * source
            shift += index * target
        corner = _index(begin, strides, shape)
        box = Box(corner, tuple(a + size for a, size in zip(corner, sizes, strict=True)))
        if any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
            raise NoBoxError("what is read of it is no box")
        pieces.append((box, Window(tensor, offset + shift, sizes, window_strides)))
    return pieces


def _index(place: int, strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at a row-major offset."""
    return tuple(place // step % size for step, size in zip(strides, shape, strict=True))


def _runs(view: torch.Tensor, stride: Sequence[int]) -> list[list[int]]:
    """Return the view's dimensions as [elements, stride in the source, stride in the window].

    They come with the largest source stride first; dimensions that continue each other on both
    sides are joined.
    """
    # Dimensions of one element have no stride that means anything.
    dims = [
        (count, source, target)
        for count, source, target in zip(view.shape, view.stride(), stride, strict=True)
        if count > 1
    ]
    runs: list[list[int]] = []
    for count, source, target in sorted(dims, key=lambda dim: -dim[1]):
        if runs and runs[-1][1] == source * count and runs[-1][2] == target * count:
            runs[-1] = [runs[-1][0] * count, source, target]
        else:
            runs.append([count, source, target])
    return runs


def _fill(
    extents: dict[int, tuple[int, int]],
    count: int,
    source: int,
    target: int,
    shape: Sequence[int],
    strides: Sequence[int],
    first: Sequence[int],
) -> tuple[int, int, int] | None:
    """Let a run fill dimensions of the tensor; return the rest of the run that fills none."""
    while count > 1:
        fitting = (
            dim
            for dim, size in enumerate(shape)
            if size > 1 and strides[dim] == source and dim not in extents
        )
        dim = next(fitting, None)
        if dim is None:
            return count, source, target

        # The last dimension of the run may be filled in part.
        if count <= shape[dim] - first[dim]:
            extents[dim] = (count, target)
            return None
        if first[dim] or count % shape[dim]:
            raise NoBoxError("what is read of it is no box")
        extents[dim] = (shape[dim], target)
        count //= shape[dim]
        source *= shape[dim]
        target *= shape[dim]
    return None


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join neighbouring boxes whose windows are neighbours, too: experts copied one by one, say."""
    # One dimension after the other: boxes joined along the first may be joined along the next.
    joined = list(pieces)
    dims = len(joined[0][0].start) if len(joined) > 1 else 0
    for dim in range(dims):
        joined.sort(key=partial(_line, dim=dim))
        done = joined[:1]
        for piece in joined[1:]:
            both = _joined(done[-1], piece, dim)
            if both is None:
                done.append(piece)
            else:
                done[-1] = both
        joined = done
    return tuple(joined)


def _line(piece: Piece, dim: int) -> tuple:
    """Return a sort key by which pieces that may be joined along `dim` become neighbours."""
    box, window = piece
    return window.tensor, _others(box.start, dim), box.start[dim]


def _others(index: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return index[:dim] + index[dim + 1 :]


def _joined(one: Piece, two: Piece, dim: int) -> Piece | None:
    """Return two pieces as one that continues along `dim`, or None where they are no neighbours."""
    (first, before), (second, after) = one, two
    if (
        before.tensor != after.tensor
        or second.start[dim] != first.stop[dim]
        or _others(first.start, dim) != _others(second.start, dim)
        or _others(first.stop, dim) != _others(second.stop, dim)
    ):
        return None

    # The step from one index to the next must be the same within both windows, and between them.
    count = first.shape[dim]
    step = before.stride[dim] if count > 1 else after.offset - before.offset
    if step <= 0 or before.offset + count * step != after.offset:
        return None
    if second.shape[dim] > 1 and after.stride[dim] != step:
        return None
    for other, size in enumerate(second.shape):
        if other != dim and size > 1 and before.stride[other] != after.stride[other]:
            return None

    box = Box(first.start, (*first.stop[:dim], second.stop[dim], *first.stop[dim + 1 :]))
    stride = (*before.stride[:dim], step, *before.stride[dim + 1 :])
    return box, Window(before.tensor, before.offset, box.shape, stride)
