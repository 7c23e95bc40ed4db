"""Requests that come while others run: streams, aborts, prefixes, and updates between them."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.counting import MODEL, Counting, InFlight, context, count_from, counting, update

from hybridflow.core.errors import HybridFlowError


def tokens(completions) -> dict[int, list[int]]:
    return {done.id: done.response_ids.tolist() for done in completions}


def test_a_stream_gives_each_request_once_as_it_ends():
    engine = counting()
    asked = [count_from(5, 0, tokens=4), count_from(20, 1, tokens=1), count_from(30, 2, tokens=2)]
    done = list(engine.submit(asked))
    assert [completion.id for completion in done] == [1, 2, 0]
    assert tokens(done) == {0: [6, 7, 8, 9], 1: [21], 2: [31, 32]}
    assert [completion.finish_reason for completion in done] == ["length"] * 3
    assert done[2].logprobs.tolist() == [-0.5] * 4 and done[2].weight_version.tolist() == [1] * 4
    assert not engine.running and not engine.busy


def test_requests_join_those_that_run():
    engine = counting()
    engine.add(count_from(5, 0, tokens=3))
    assert engine.busy and engine.step() == []
    engine.add(count_from(20, 1, tokens=1))
    assert tokens(engine.step()) == {1: [21]}
    assert tokens(engine.step()) == {0: [6, 7, 8]}
    assert not engine.busy and engine.step() == []
    engine.add(count_from(9, 0, tokens=1))  # its id is free again
    assert tokens(engine.step()) == {0: [10]}


def test_an_id_that_runs_cannot_enter_again():
    engine = counting()
    engine.add(count_from(5, 7))
    with pytest.raises(HybridFlowError, match="request 7: a request with this id is running"):
        engine.add(count_from(6, 7))


def test_a_prefix_is_part_of_the_response_and_is_gone_on_from():
    engine = counting(step=2.0)
    prefix = {"prefix_ids": [8, 3], "prefix_logprobs": [-1.0, -2.0], "prefix_versions": [0, 0]}
    [done] = engine.generate([count_from(5, tokens=4, **prefix)])
    assert done.response_ids.tolist() == [8, 3, 5, 7]
    assert done.logprobs.tolist() == [-1.0, -2.0, -0.5, -0.5]
    assert done.weight_version.tolist() == [0, 0, 1, 1]


def test_a_request_that_has_ended_before_it_came_never_enters():
    engine = counting()
    stopped = count_from(5, 0, tokens=9, prefix_ids=[8, 3], stop_token_ids=(3,))
    full = count_from(5, 1, tokens=2, prefix_ids=[8, 3])
    done = list(engine.submit([stopped, full, count_from(5, 2, tokens=1)]))
    assert {c.id: c.finish_reason for c in done} == {0: "stop", 1: "length", 2: "length"}
    assert tokens(done) == {0: [8, 3], 1: [8, 3], 2: [6]} and engine.made == {}


def test_what_is_aborted_comes_out_with_what_it_has():
    engine = counting()
    stream = engine.submit([count_from(5, 0, tokens=1), count_from(20, 1), count_from(30, 2)])
    assert next(stream).id == 0
    engine.abort([2, 99])  # 99 does not run: nothing to end
    found = list(stream)
    assert tokens(found) == {2: [31], 1: [21, 22, 23]} and found[0].finish_reason == "abort"

    engine.add(count_from(5, 0))
    engine.add(count_from(6, 1))
    engine.abort()
    done = engine.step()
    assert [completion.finish_reason for completion in done] == ["abort"] * 2
    assert tokens(done) == {0: [], 1: []}


def test_a_new_stream_ends_an_old_one_that_was_not_read_to_its_end():
    engine = counting()
    old = engine.submit([count_from(5, 0, tokens=1), count_from(20, 1)])
    next(old)
    assert tokens(engine.submit([count_from(30, 1, tokens=1)])) == {1: [31]}
    with pytest.raises(HybridFlowError, match="ended by a later submit"):
        next(old)


def test_a_request_alone_ends_a_stream_that_nobody_has_begun_to_read():
    engine = counting()
    engine.submit([count_from(20, 1)])
    engine.add(count_from(30, 1, tokens=1))
    assert tokens(engine.step()) == {1: [31]}


def test_what_nobody_waits_for_does_not_count_as_work():
    engine = counting()
    engine.add(count_from(5, 0))
    engine.disown()
    assert not engine.busy
    engine.add(count_from(20, 1, tokens=1))
    assert tokens(engine.step()) == {1: [21]} and not engine.running


@pytest.mark.parametrize("verb", ["add", "submit"])
def test_what_cannot_be_served_is_refused_before_it_enters(verb):
    engine = counting()

    def ask(request):
        return engine.add(request) if verb == "add" else engine.submit([request])

    long = "request 3: 1 prompt tokens and max_tokens 40 exceed"
    with pytest.raises(HybridFlowError, match=long):
        ask(count_from(5, 3, tokens=40))
    outside = "request 4: a token id lies outside the vocabulary of 50"
    with pytest.raises(HybridFlowError, match=outside):
        ask(count_from(50, 4))
    engine.asleep = True
    with pytest.raises(HybridFlowError, match="the rollout engine sleeps"):
        ask(count_from(5))
    assert not engine.running


def test_without_weights_or_in_the_middle_of_an_update_nothing_is_generated():
    engine = Counting(MODEL, None, context())
    engine.start()
    with pytest.raises(HybridFlowError, match="has no weights yet"):
        engine.add(count_from(5))
    engine.begin_update(1)
    with pytest.raises(HybridFlowError, match="version 1 was begun and not ended"):
        engine.submit([count_from(5)])


def test_an_update_waits_for_what_runs_and_ends_what_nobody_reads():
    engine = counting()
    stream = engine.submit([count_from(5, 0, tokens=1), count_from(20, 1)])
    next(stream)
    with pytest.raises(HybridFlowError, match="a weight update while sequences run"):
        engine.begin_update(2)
    stream.close()
    update(engine, 2, 10.0)
    assert not engine.running
    [done] = engine.generate([count_from(5, tokens=2)])
    assert done.response_ids.tolist() == [15, 25] and done.weight_version.tolist() == [2, 2]


def test_an_engine_that_can_takes_new_weights_while_sequences_run():
    engine = counting(InFlight)
    engine.add(count_from(5, tokens=3))
    engine.step()
    update(engine, 2, 10.0)
    engine.step()
    [done] = engine.step()
    assert done.response_ids.tolist() == [6, 16, 26]
    assert done.weight_version.tolist() == [1, 2, 2]


def test_it_cannot_sleep_while_somebody_waits():
    engine = counting()
    stream = engine.submit([count_from(5, 0, tokens=1), count_from(20, 1)])
    next(stream)
    with pytest.raises(HybridFlowError, match="cannot sleep while sequences run"):
        engine.check_idle()
    stream.close()
    engine.check_idle()
    assert not engine.running and not engine.busy
    engine.asleep = True
    with pytest.raises(HybridFlowError, match="wake it before a weight update"):
        engine.begin_update(2)


class Told(Counting):
    def start(self) -> None:
        super().start()
        self.said: list = []

    def release(self) -> None:
        self.said.append("release")

    def resume(self, weights: bool, cache: bool) -> None:
        self.said.append((weights, cache))


@pytest.mark.parametrize(("device", "version"), [("cpu", 1), ("cuda", None)])
def test_memory_goes_once_and_comes_back_in_parts(device, version):
    engine = counting(Told)
    engine.context = attrs.evolve(engine.context, device=torch.device(device))
    engine.wake()
    engine.sleep()
    engine.sleep()
    assert engine.version == version
    engine.wake(cache=False)
    with pytest.raises(HybridFlowError, match="wake it before generating"):
        engine.add(count_from(5))
    engine.wake()
    engine.wake()
    engine.sleep()
    engine.wake()
    both = [(True, False), (False, True)]
    assert engine.said == ["release", *both, "release", (True, True)]


def test_a_completion_is_by_default_of_the_present_weights():
    engine = counting()
    done = engine.completion(count_from(5, 6), [9, 8], [-0.25, -0.5], "stop")
    assert (done.id, done.finish_reason) == (6, "stop")
    assert done.weight_version.tolist() == [1, 1]
    assert done.response_ids.dtype == np.int64 and done.logprobs.dtype == np.float32
