"""Sums over windows beside those of the parameter itself."""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.values.checksum import checksum
from hybridflow.core.values.weights import Box
from hybridflow.kit.tracing.proofs import WindowSums
from hybridflow.kit.tracing.windows import Window

WHOLE = torch.randn(6, 4)
FULL = Box.full((6, 4))
ROWS = (Box((0, 0), (2, 4)), Box((2, 0), (6, 4)))


def own(box: Box) -> int:
    return int(checksum(WHOLE[box.slices()], box)) % 2**64


def stored() -> dict[str, torch.Tensor]:
    """The parameter in two tensors, the second one transposed and with padding, and once more in a third."""
    turned = torch.zeros(4, 5)
    turned[:, :4] = WHOLE[2:].t()
    return {"a": WHOLE[:2].clone(), "b": turned, "twin": WHOLE.clone()}


PIECES = {
    "w": [
        (ROWS[0], Window("a", 0, (2, 4), (4, 1))),
        (ROWS[1], Window("b", 0, (4, 4), (1, 5))),
        (ROWS[0], Window("twin", 0, (2, 4), (4, 1))),
        (ROWS[1], Window("twin", 8, (4, 4), (4, 1))),
    ]
}


def total(tensors: dict[str, torch.Tensor], *boxes: Box) -> int:
    sums = WindowSums(PIECES)
    sums.expect({"w": (torch.float32, boxes)})
    for name, tensor in tensors.items():
        sums.look(name, tensor)
    return sums.totals().get("w", 0)


@pytest.mark.parametrize("box", [FULL, ROWS[0], Box((1, 0), (4, 4)), Box((3, 1), (5, 3))])
def test_windows_together_have_the_sum_of_the_box(box):
    assert total(stored(), box) == own(box)


def test_boxes_are_added():
    assert total(stored(), *ROWS) == own(FULL)


@pytest.mark.parametrize(
    ("tensor", "index"), [("a", (1, 2)), ("b", (0, 3)), ("twin", (0, 0)), ("twin", (5, 3))]
)
def test_an_element_that_differs_in_any_window_is_seen(tensor, index):
    tensors = stored()
    tensors[tensor][index] += 1
    assert total(tensors, FULL) != own(FULL)


def test_padding_is_not_looked_at():
    tensors = stored()
    tensors["b"][:, 4] = 7
    assert total(tensors, FULL) == own(FULL)


def test_windows_that_overlap_in_part_count_each_element_once():
    more = {"w": [*PIECES["w"][:2], (FULL, Window("twin", 0, (6, 4), (4, 1)))]}
    sums = WindowSums(more)
    sums.expect({"w": (torch.float32, (FULL,))})
    for name, tensor in stored().items():
        sums.look(name, tensor)
    assert sums.totals() == {"w": own(FULL)}


def test_each_proof_begins_anew():
    sums = WindowSums(PIECES)
    for boxes, expected in (((ROWS[1],), {"w": own(ROWS[1])}), ((), {})):
        sums.expect({"w": (torch.float32, boxes)})
        for name, tensor in stored().items():
            sums.look(name, tensor)
        assert sums.totals() == expected
