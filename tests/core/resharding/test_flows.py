"""Flows: who sends to whom, and all transfers of a plan as one sequence."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.resharding.flows import Flow, Transfer, Transfers
from hybridflow.core.values.weights import Box

HALF = Box((0, 0), (2, 3))
SHARED = Flow(("a", "b"), HALF, 4, (0, 7), np.array([2, 3, 4, 5, 6]), frozenset({4}))
SINGLE = Flow(("c",), Box.full((5,)), 2, (1,), np.array([0, 9]), frozenset())


def test_each_sender_has_an_equal_run_of_the_receivers():
    assert list(SHARED.pairs()) == [(0, 2), (0, 3), (7, 5), (7, 6)]
    assert SHARED.count == 4
    assert SHARED.receivers.tolist() == [2, 3, 5, 6]
    assert list(SINGLE.pairs()) == [(1, 0), (1, 9)]


@pytest.mark.parametrize("flow", [SHARED, SINGLE])
def test_a_rank_finds_its_own_part_of_the_pairs(flow):
    pairs = list(flow.pairs())
    for rank in range(11):
        assert flow.sender_of(rank) == next(
            (sender for sender, receiver in pairs if receiver == rank), None
        )
        assert flow.receivers_of(rank) == [receiver for sender, receiver in pairs if sender == rank]


def test_bytes_are_those_of_one_parameter_for_one_receiver():
    assert SHARED.nbytes == 2 * 3 * 4
    assert SINGLE.nbytes == 5 * 2


def test_transfers_are_a_sequence_parameter_by_parameter():
    transfers = Transfers([SHARED, SINGLE])
    expected = [
        Transfer(name, flow.box, sender, receiver)
        for flow in (SHARED, SINGLE)
        for name in flow.names
        for sender, receiver in flow.pairs()
    ]
    assert len(transfers) == 10
    assert list(transfers) == expected
    assert [transfers[at] for at in range(10)] == expected
    assert [transfers[at] for at in range(-10, 0)] == expected
    assert transfers[7:9] == expected[7:9]


def test_there_is_nothing_behind_the_last_transfer():
    for at in (10, -11):
        with pytest.raises(IndexError):
            Transfers([SHARED, SINGLE])[at]
    assert len(Transfers([])) == 0
    assert list(Transfers([])) == []
