"""Requests that run together: when they enter and leave, and what each turn gives."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.scheduler import Run
from hybridflow.core.contracts.rollout import Request, SamplingParams

CPU = torch.device("cpu")


def request(number, tokens, prompt=(1, 2, 3), **sampling):
    return Request(number, np.array(prompt), SamplingParams(tokens, temperature=0.0, **sampling))


@pytest.fixture
def begun(tiny):
    """begun(requests, slots, ...): a run of them on our decoder."""

    def begin(requests, slots, capacity=64, **config):
        decoder = tiny("qwen2").engine.decoder
        decoder.reserve(slots, capacity)
        return Run(decoder, requests, slots, TransformersEngineConfig(**config), CPU)

    return begin


def turns(run, version=1):
    """The ids that ended in each turn, until it is over."""
    found = []
    while not run.over:
        found.append([completion.id for completion in run.turn(version)])
    return found


def test_waiting_requests_take_the_slots_of_those_that_end(begun):
    """A turn lets requests in, one token each, or goes on to the nearest end: none can stop before.

    In turn: 0 and 1 enter; 2 enters; 1 and 2 make two tokens; 3 enters; 2 and 3 make one; 2 makes
    the last.
    """
    run = begun([request(0, 1), request(1, 3), request(2, 5), request(3, 2)], slots=2)
    assert turns(run) == [[0], [], [1], [], [3], [2]]
    assert run.turn(1) == []


def test_where_a_token_may_stop_a_row_every_turn_makes_one(begun):
    run = begun([request(0, 4, stop_token_ids=(48,))], slots=1)
    assert turns(run) == [[], [], [], [0]]


def test_tokens_carry_the_version_of_the_weights_that_made_them(begun):
    run = begun([request(0, 4, stop_token_ids=(48,))], slots=1)
    assert [run.turn(version) for version in (5, 5, 6)] == [[], [], []]
    (done,) = run.turn(9)
    assert done.weight_version.tolist() == [5, 5, 6, 9]
    assert done.finish_reason == "length"


def test_a_prefill_takes_prompts_up_to_its_tokens_and_equal_neighbours_once(begun):
    long, short = tuple(range(10)), (7, 8)
    prompts = [long, long, short, short, long]
    requests = [request(i, 2, prompt) for i, prompt in enumerate(prompts)]
    run = begun(requests, slots=5, prefill_tokens=20)  # two prompts of ten, padding included
    run.turn(1)
    assert sorted(run.rows["request"]) == [0, 1, 2, 3]
    assert sorted(chain(*turns(run))) == [0, 1, 2, 3, 4]


def test_a_further_request_is_taken_if_cache_output_and_stop_tokens_have_room(begun):
    run = begun([request(0, 10, stop_token_ids=(5, 6))], slots=2)
    assert run.takes(request(1, 10))
    assert run.takes(request(1, 1, prompt=[1] * 63))
    assert not run.takes(request(1, 2, prompt=[1] * 63))
    assert not run.takes(request(1, 11))
    assert not run.takes(request(1, 10, stop_token_ids=(5, 6, 7)))
    run.extend([request(1, 10)])
    assert sorted(chain(*turns(run))) == [0, 1]


def test_an_abort_gives_back_running_and_waiting_requests_with_what_they_have(begun):
    prefix = np.array([9, 8])
    waiting = Request(2, np.array([4]), SamplingParams(9), prefix_ids=prefix)
    run = begun([request(0, 9, stop_token_ids=(48,)), waiting], slots=1)
    run.turn(1)
    run.turn(1)
    run.abort([0, 2, 77])
    done = {completion.id: completion for completion in run.turn(1)}
    assert sorted(done) == [0, 2]
    assert {completion.finish_reason for completion in done.values()} == {"abort"}
    assert len(done[0].response_ids) == 2
    assert done[2].response_ids.tolist() == [9, 8]
    assert run.over
