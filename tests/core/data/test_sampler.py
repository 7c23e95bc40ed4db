"""Rows are drawn in an order that two numbers resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hybridflow.core.data.sampler import Sampler
from hybridflow.core.errors import DataError


@settings(deadline=None)
@given(
    n=st.integers(1, 40), seed=st.integers(0, 2**40), takes=st.lists(st.integers(0, 90), max_size=8)
)
def test_each_epoch_is_a_permutation_however_the_rows_are_drawn(n, seed, takes):
    sampler = Sampler(n, seed)
    drawn = np.concatenate([sampler.take(k) for k in takes] + [sampler.take(-sum(takes) % n)])
    assert drawn.dtype == np.int64
    for epoch in drawn.reshape(-1, n):
        assert sorted(epoch) == list(range(n))
    assert (sampler.epoch, sampler.position) == (len(drawn) // n, 0)


@settings(deadline=None)
@given(
    n=st.integers(1, 40),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
    before=st.integers(0, 130),
    after=st.integers(0, 130),
)
def test_a_resumed_stream_equals_an_uninterrupted_one(n, seed, shuffle, before, after):
    whole = Sampler(n, seed, shuffle).take(before + after)
    first = Sampler(n, seed, shuffle)
    assert np.array_equal(first.take(before), whole[:before])
    resumed = Sampler(n, seed, shuffle)
    resumed.load_state_dict(first.state_dict())
    assert np.array_equal(resumed.take(after), whole[before:])


def test_orders_differ_between_epochs_and_seeds_and_stay_without_shuffle():
    epochs = Sampler(100, seed=1).take(200).reshape(2, 100)
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], Sampler(100, seed=2).take(100))
    assert Sampler(3, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_stream_does_not_go_on_with_other_data():
    state = Sampler(10, seed=1).state_dict()
    with pytest.raises(DataError, match="n_rows was 10 and is 9"):
        Sampler(9, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="0 rows"):
        Sampler(0)
