"""Views cut into boxes, against the elements themselves."""

from __future__ import annotations

import random

import pytest
import torch

from hybridflow.core.values.weights import Box
from hybridflow.kit.tracing.windows import (
    MOST_PIECES,
    NoBoxError,
    Window,
    merged,
    pieces_of_view,
    strides_of,
)


def written(pieces, source: torch.Tensor, size: int) -> torch.Tensor:
    target = torch.full((size,), -1)
    for box, window in pieces:
        window.of(target).copy_(source[box.slices()])
    return target


def random_view(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Narrowed, permuted and split a few times."""
    for _ in range(draw.randint(1, 4)):
        dim = draw.randrange(tensor.ndim)
        kind = draw.choice(["narrow", "permute", "split", "select"])
        if kind == "narrow" and tensor.shape[dim] > 1:
            start = draw.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, draw.randint(1, tensor.shape[dim] - start))
        elif kind == "permute":
            tensor = tensor.transpose(dim, draw.randrange(tensor.ndim))
        elif kind == "split" and tensor.shape[dim] % 2 == 0:
            tensor = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
        elif kind == "select" and tensor.ndim > 1:
            tensor = tensor.select(dim, draw.randrange(tensor.shape[dim]))
    return tensor


@pytest.mark.parametrize("seed", range(200))
def test_the_boxes_of_a_view_have_its_elements_in_their_places(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
    source = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = random_view(draw, source)
    expected = view.reshape(-1)
    pieces = pieces_of_view(shape, view, "to", 0, strides_of(view.shape))
    assert torch.equal(written(pieces, source, view.numel()), expected)
    assert torch.equal(written(merged(pieces), source, view.numel()), expected)
    assert len(merged(pieces)) <= len(pieces)


def test_a_flat_part_that_begins_in_a_row_and_ends_in_another_is_no_box():
    source = torch.zeros(4, 5)
    with pytest.raises(NoBoxError, match="no box"):
        pieces_of_view((4, 5), source.view(-1)[3:9], "to", 0, (1,))


def test_a_view_of_too_many_boxes_is_none():
    source = torch.zeros(2 * MOST_PIECES + 2, 1)
    with pytest.raises(NoBoxError, match=f"more than {MOST_PIECES} boxes"):
        pieces_of_view(tuple(source.shape), source[::2], "to", 0, (1, 1))


def test_neighbours_of_other_tensors_or_with_a_gap_stay_apart():
    def piece(row, tensor, offset):
        return Box((row, 0), (row + 1, 2)), Window(tensor, offset, (1, 2), (2, 1))

    assert len(merged([piece(0, "a", 0), piece(1, "b", 2)])) == 2
    assert len(merged([piece(0, "a", 0), piece(2, "a", 4)])) == 2
    assert merged([piece(1, "a", 2), piece(0, "a", 0)]) == (
        (Box((0, 0), (2, 2)), Window("a", 0, (2, 2), (2, 1))),
    )
