"""Shares of senders, beside the best that any sharing could do."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hybridflow.core.resharding.balance import balance, level

RANKS = range(5)
senders = st.sets(st.sampled_from(RANKS), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


def least_maximum(demands, load) -> float:
    """Of every set of ranks: what they send already, and what nobody else can send, evenly (Hall's condition)."""
    best = 0.0
    for count in range(1, len(RANKS) + 1):
        for chosen in combinations(RANKS, count):
            must = sum(nbytes for ranks, nbytes in demands.items() if set(ranks) <= set(chosen))
            best = max(best, (must + sum(load.get(rank, 0) for rank in chosen)) / count)
    return best


@given(
    st.dictionaries(senders, st.integers(0, 10_000), max_size=6),
    st.dictionaries(st.sampled_from(RANKS), st.integers(0, 10_000)),
)
def test_the_most_loaded_sender_has_hardly_more_than_it_must_and_every_byte_is_sent(demands, load):
    shares = balance(demands, load)
    total = {rank: load.get(rank, 0) for rank in RANKS}
    for ranks, nbytes in demands.items():
        assert sum(shares[ranks]) == nbytes
        assert min(shares[ranks]) >= 0
        for rank, share in zip(ranks, shares[ranks], strict=True):
            total[rank] += share
    rounding = len(demands)  # a byte for each set
    assert max(total.values()) <= 1.02 * least_maximum(demands, load) + rounding


def test_who_has_no_choice_is_relieved_by_who_has_one():
    assert balance({(0,): 10, (0, 1): 10}, {}) == {(0,): [10], (0, 1): [0, 10]}
    assert balance({(0, 1): 10}, {0: 4}) == {(0, 1): [3, 7]}
    assert balance({(0, 1, 2): 30, (1, 2): 0}, {}) == {(0, 1, 2): [10, 10, 10], (1, 2): [0, 0]}
    assert balance({}, {0: 7}) == {}


@pytest.mark.parametrize(
    ("load", "amount", "poured"),
    [
        ([0.0, 2.0, 5.0], 3, [2.5, 0.5, 0.0]),
        ([5.0, 0.0, 2.0], 11, [1.0, 6.0, 4.0]),
        ([1.0, 1.0], 4, [2.0, 2.0]),
        ([3.0, 9.0], 0, [0.0, 0.0]),
        ([3.0], 2, [2.0]),
    ],
)
def test_water_finds_the_lowest_vessels(load, amount, poured):
    np.testing.assert_allclose(level(np.array(load), amount), poured)
