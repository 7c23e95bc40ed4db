"""Homes of outputs: tokens in, completions out, and room for more."""

from __future__ import annotations

import numpy as np

from hybridflow.backends.transformers.outputs import SPARE, Outputs
from hybridflow.core.contracts.rollout import Request, SamplingParams


def request(number, prefix=()):
    versions = np.full(len(prefix), 3)
    return Request(
        number,
        np.array([1]),
        SamplingParams(9),
        prefix_ids=np.array(prefix, np.int64),
        prefix_logprobs=np.full(len(prefix), -0.5),
        prefix_versions=versions,
    )


def test_tokens_come_back_behind_their_prefix_and_those_of_dead_rows_do_not():
    outputs = Outputs()
    outputs.reserve(2, 8)
    first, length = outputs.take(request(7, prefix=(4, 5)))
    second, none = outputs.take(request(8))
    assert (length, none, outputs.free) == (2, 0, [])
    outputs.store(
        np.array([first, SPARE, second]),
        np.array([length, 0, none]),
        np.array([[10, 11, 12], [20, 21, 22]]),
        np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]),
        9,
    )
    done = outputs.give(first, 4, 7, "stop")
    assert (done.id, done.finish_reason) == (7, "stop")
    assert done.response_ids.tolist() == [4, 5, 10, 20]
    assert done.logprobs.tolist() == [-0.5, -0.5, -1, -4]
    assert done.weight_version.tolist() == [3, 3, 9, 9]
    assert outputs.give(second, 2, 8, "length").response_ids.tolist() == [12, 22]
    assert sorted(outputs.free) == [1, 2]


def test_more_room_leaves_what_is_in_use_where_it_is():
    outputs = Outputs()
    outputs.reserve(2, 4)
    home, _ = outputs.take(request(0, prefix=(6, 7, 8)))
    outputs.reserve(2, 4)
    assert outputs.tokens.shape == (3, 4)
    outputs.reserve(5, 2)  # no narrower than before
    assert outputs.tokens.shape == (6, 4)
    outputs.reserve(1, 10)
    assert outputs.tokens.shape == (6, 10)
    assert sorted([home, *outputs.free]) == [1, 2, 3, 4, 5]
    assert outputs.give(home, 3, 0, "abort").response_ids.tolist() == [6, 7, 8]


def test_without_use_the_room_is_what_is_asked_for():
    outputs = Outputs()
    outputs.reserve(9, 1000)
    outputs.reserve(20, 10)
    assert outputs.tokens.shape == (21, 10)
    assert sorted(outputs.free) == list(range(1, 21))
