from __future__ import annotations

import pytest
import torch

from hybridflow.kit.offload import Residence


@pytest.fixture
def weights():
    return [torch.arange(6.0).view(2, 3), torch.full((4,), 2.0)]


@pytest.fixture
def residence(weights):
    moments: list[torch.Tensor] = []
    made = Residence(
        torch.device("cpu"), {"weights": lambda: weights, "optimizer": lambda: moments}
    )
    made.moments = moments
    return made


def test_what_is_away_takes_no_memory_and_comes_back_in_place(residence, weights):
    view = weights[0][1]
    residence.offload(("weights",))
    assert [w.untyped_storage().nbytes() for w in weights] == [0, 0] and residence.away == {
        "weights"
    }
    residence.onload(("weights",))
    assert weights[0].tolist() == [[0, 1, 2], [3, 4, 5]] and weights[1].tolist() == [2] * 4
    assert view.tolist() == [3, 4, 5] and not residence.away


def test_parts_move_by_themselves_and_twice_is_once(residence, weights):
    residence.moments.append(torch.ones(3))
    residence.offload(("weights", "optimizer"))
    residence.offload(("weights",))
    residence.onload(("weights",))
    residence.onload(("weights",))
    assert weights[1].tolist() == [2] * 4
    assert residence.moments[0].untyped_storage().nbytes() == 0
    residence.onload(("optimizer",))
    assert residence.moments[0].tolist() == [1] * 3


def test_a_part_may_grow(residence):
    residence.offload(("optimizer",))
    residence.onload(("optimizer",))
    residence.moments.append(torch.ones(3))
    residence.offload(("optimizer",))
    assert residence.moments[0].untyped_storage().nbytes() == 0


def test_values_are_copied_out_only_where_somebody_said_that_they_changed(residence, weights):
    residence.offload(("weights",))
    residence.onload(("weights",))
    weights[1].fill_(5.0)  # unsaid: the copy on the host counts
    residence.offload(("weights",))
    residence.onload(("weights",))
    assert weights[1].tolist() == [2] * 4

    weights[1].fill_(5.0)
    residence.changed("weights")
    residence.offload(("weights",))
    residence.onload(("weights",))
    assert weights[1].tolist() == [5] * 4


def test_tensors_that_share_a_storage_move_it_once(residence, weights):
    weights.append(weights[0].view(-1)[2:])
    residence.offload(("weights",))
    residence.onload(("weights",))
    assert weights[2].tolist() == [2, 3, 4, 5]
    weights[2].zero_()
    assert weights[0].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_scratch_leaves_with_its_part_without_a_copy_and_comes_back_as_zeros(weights):
    gradients = torch.full((5,), 3.0)
    residence = Residence(
        torch.device("cpu"),
        {"weights": lambda: weights, "optimizer": lambda: []},
        scratch={"optimizer": lambda: [gradients, gradients[2:]]},
    )
    residence.offload(("weights",))
    assert gradients.tolist() == [3.0] * 5
    residence.offload(("optimizer",))
    assert gradients.untyped_storage().nbytes() == 0
    residence.onload(("optimizer",))
    assert gradients.tolist() == [0.0] * 5
    residence.onload(("weights",))
    assert gradients.tolist() == [0.0] * 5 and weights[1].tolist() == [2] * 4
