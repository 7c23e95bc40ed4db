"""Sends within one process group."""

from __future__ import annotations

from helpers.transport_jobs import link, rounds

from hybridflow.backends.transports.collective import Collective


def test_it_serves_one_process_group_and_says_so_of_others():
    assert Collective.problem(link(0)) is None
    assert "not in one process group" in str(Collective.problem(link(0, grouped=False)))


def test_a_round_without_messages_needs_no_group():
    assert Collective(link(0)).start({}, {}).wait() == {}


def test_two_rounds_under_way_bring_each_rank_its_own_bytes(ranks):
    both_ways = {(0, 1): [1, 2, 3], (1, 0): [255]}
    one_way = {(1, 0): [7, 0, 7, 0]}
    first, second = ranks(rounds, 2, [both_ways, one_way])
    assert first == [{1: [255]}, {1: [7, 0, 7, 0]}]
    assert second == [{0: [1, 2, 3]}, {}]
