"""Requests in one decoder: when they enter and leave, and what each turn gives."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.scheduler import Scheduler
from hybridflow.core.contracts.rollout import Request, SamplingParams

CPU = torch.device("cpu")


def request(number, tokens, prompt=(1, 2, 3), **sampling):
    return Request(number, np.array(prompt), SamplingParams(tokens, temperature=0.0, **sampling))


@pytest.fixture
def begun(tiny):
    """begun(requests, ...): a scheduler of our decoder with these requests waiting."""

    def begin(requests, **config):
        decoder = tiny("qwen2").engine.decoder
        decoder.free()
        scheduler = Scheduler(decoder, TransformersEngineConfig(**config), CPU)
        for request in requests:
            scheduler.add(request)
        return scheduler

    return begin


def over(scheduler):
    return not scheduler.waiting and not scheduler.running


def turns(scheduler, version=1):
    """The ids that ended in each turn, until it is over."""
    found = []
    while not over(scheduler):
        found.append([completion.id for completion in scheduler.turn(version)])
    return found


def test_waiting_requests_take_the_slots_of_those_that_end(begun):
    """A turn lets requests in, one token each, or goes on to the nearest end: none can stop before.

    In turn: 0 and 1 enter; 2 enters; 1 and 2 make two tokens; 3 enters; 2 and 3 make one; 2 makes
    the last.
    """
    requests = [request(0, 1), request(1, 3), request(2, 5), request(3, 2)]
    scheduler = begun(requests, max_sequences=2)
    assert turns(scheduler) == [[0], [], [1], [], [3], [2]]
    assert scheduler.turn(1) == []


def test_where_a_token_may_stop_a_row_every_turn_makes_one(begun):
    scheduler = begun([request(0, 4, stop_token_ids=(48,))])
    assert turns(scheduler) == [[], [], [], [0]]


def test_tokens_carry_the_version_of_the_weights_that_made_them(begun):
    scheduler = begun([request(0, 4, stop_token_ids=(48,))])
    assert [scheduler.turn(version) for version in (5, 5, 6)] == [[], [], []]
    (done,) = scheduler.turn(9)
    assert done.weight_version.tolist() == [5, 5, 6, 9]
    assert done.finish_reason == "length"


def test_a_prefill_takes_prompts_up_to_its_tokens_and_equal_neighbours_once(begun):
    long, short = tuple(range(10)), (7, 8)
    prompts = [long, long, short, short, long]
    requests = [request(i, 2, prompt) for i, prompt in enumerate(prompts)]
    scheduler = begun(requests, prefill_tokens=20)  # two prompts of ten, padding included
    scheduler.turn(1)
    assert sorted(scheduler.rows["request"]) == [0, 1, 2, 3]
    assert sorted(chain(*turns(scheduler))) == [0, 1, 2, 3, 4]


def test_the_longest_prompt_of_a_prefill_is_the_first_row(begun):
    scheduler = begun([request(0, 2, (1,)), request(1, 2, (1, 2, 3)), request(2, 2, (4, 5))])
    scheduler.turn(1)
    assert scheduler.rows["request"].tolist() == [1, 2, 0]


def test_a_short_request_beside_two_hundred_running_ones_ends_when_it_is_done(begun):
    """It enters at once, and makes a token each turn from then on."""
    stop = {"stop_token_ids": (48,)}
    scheduler = begun([request(i, 40, (i % 48,), **stop) for i in range(200)])
    for _ in range(5):
        assert scheduler.turn(1) == []
    scheduler.add(request(999, 3, (7, 8), **stop))
    assert [[done.id for done in scheduler.turn(1)] for _ in range(3)] == [[], [], [999]]
    assert len(scheduler.running) == 200


def test_what_comes_later_may_be_longer_than_all_before_and_have_more_stop_tokens(begun, tiny):
    first = request(0, 30, stop_token_ids=(48,))
    scheduler = begun([first])
    scheduler.turn(1)
    assert scheduler.decoder.capacity == 64
    later = request(1, 90, (5,) * 100, stop_token_ids=(48, 49, 50))
    scheduler.add(later)
    done = {}
    while not over(scheduler):
        done.update((completion.id, completion) for completion in scheduler.turn(1))
    assert scheduler.decoder.capacity == 192
    case = tiny("qwen2")
    for one in (first, later):
        expected = case.hf_greedy(one.prompt_ids, one.sampling.max_tokens)
        assert done[one.id].response_ids.tolist() == expected.tolist()


def test_more_stop_tokens_leave_those_of_the_rows_that_run(begun, tiny):
    prompt = np.array([1, 2, 3])
    tokens = tiny("qwen2").hf_greedy(prompt, 20).tolist()
    stop = next(token for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    scheduler = begun([request(0, 20, stop_token_ids=(stop,))])
    scheduler.turn(1)
    scheduler.add(request(1, 2, stop_token_ids=(48, 49, 50)))
    done = []
    while not over(scheduler):
        done += scheduler.turn(1)
    (first,) = [completion for completion in done if completion.id == 0]
    assert first.finish_reason == "stop"
    assert first.response_ids.tolist() == tokens[: tokens.index(stop) + 1]


def test_a_request_that_the_memory_has_no_room_for_waits_and_others_behind_it(begun):
    """A row of 64 columns takes 2 x 2 x 2 x 64 x 16 x 4 bytes = 32,768; the limit is 100,000.

    Three short requests run. A long one needs 128 columns a row: one such row fits beside no
    other. The short one behind it does not overtake it.
    """
    stop = {"stop_token_ids": (48,)}
    short = [request(i, 5 + i, **stop) for i in range(3)]
    scheduler = begun([*short, request(3, 100, **stop), request(4, 2, **stop)], kv_memory_gb=1e-4)
    found = turns(scheduler)
    assert [ids for ids in found if ids] == [[0], [1], [2], [3], [4]]
    # 1 turn to enter and 6 more for the last short one; then 100 for the long one
    assert found.index([3]) == 7 + 99


def test_a_prefill_waits_for_an_eighth_of_the_rows_or_for_the_last_requests(begun):
    stop = {"stop_token_ids": (48,)}
    rows = [request(i, 4 if i < 1 else 6 if i < 3 else 40, **stop) for i in range(16)]
    later = [request(16 + i, 40, **stop) for i in range(4)]
    scheduler = begun([*rows, *later], max_sequences=16)
    waiting = []
    for _ in range(8):
        scheduler.turn(1)
        waiting.append(len(scheduler.waiting))
    # Row 0 ends in turn 4: one free slot of 16 is too few. Rows 1 and 2 end in turn 6.
    assert waiting == [4, 4, 4, 4, 4, 4, 1, 1]


def test_an_abort_gives_back_running_and_waiting_requests_with_what_they_have(begun):
    prefix = np.array([9, 8])
    waiting = Request(2, np.array([4]), SamplingParams(9), prefix_ids=prefix)
    scheduler = begun([request(0, 9, stop_token_ids=(48,)), waiting], max_sequences=1)
    scheduler.turn(1)
    scheduler.turn(1)
    done = {completion.id: completion for completion in scheduler.abort({0, 2, 77})}
    assert sorted(done) == [0, 2]
    assert {completion.finish_reason for completion in done.values()} == {"abort"}
    assert len(done[0].response_ids) == 2
    assert done[2].response_ids.tolist() == [9, 8]
    assert over(scheduler)


def test_an_id_may_be_used_again_while_the_row_of_the_first_one_is_not_gone(begun):
    stop = {"stop_token_ids": (48,)}
    scheduler = begun([request(i, 30, (i + 1,), **stop) for i in range(40)])
    scheduler.turn(1)
    scheduler.abort({3})
    scheduler.turn(1)
    assert len(scheduler.rows) == 40
    scheduler.add(request(3, 2, (9,), **stop))
    found = turns(scheduler)
    assert found[1] == [3]
    assert sorted(chain(*found)) == list(range(40))


def test_what_a_request_has_made_is_known_while_it_runs(begun):
    scheduler = begun([request(0, 6), request(1, 4, (5, 6)), request(2, 3, (7,))], max_sequences=2)
    parts = {0: [], 1: [], 2: []}
    done = {}
    while not over(scheduler):
        for number, seen in parts.items():
            seen.append(scheduler.partial(number).tolist())
        done |= {completion.id: completion for completion in scheduler.turn(1)}
    for number, seen in parts.items():
        tokens = done[number].response_ids.tolist()
        assert seen[0] == [] and any(seen)
        assert all(part == tokens[: len(part)] for part in seen)
