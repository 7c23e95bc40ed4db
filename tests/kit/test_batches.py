"""One request after the other, where an engine has batches alone; as where it admits them while others run."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.batch_engine import BatchEngine

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.testing import give_weights, one_rank, reference

PROMPT = np.array([1, 2, 3])


@pytest.fixture(scope="module")
def continuous():
    with one_rank() as context:
        engine = TransformersEngine(reference().spec, TransformersEngineConfig(), context)
        engine.start()
        give_weights(engine, reference().parameters, 1)
        yield engine


@pytest.fixture(params=["continuous", "batches"])
def engine(request, continuous):
    return continuous if request.param == "continuous" else BatchEngine(continuous)


def asked(at: int, tokens: int) -> Request:
    return Request(at, PROMPT, SamplingParams(max_tokens=tokens), seed=at)


def ended(engine) -> list:
    """Completions until nobody waits for one."""
    found = []
    while engine.busy:
        found += engine.step()
    return found


def test_every_request_is_answered_as_generate_answers_it(engine):
    requests = [asked(at, 4 + at) for at in range(3)]
    expected = {done.id: done.response_ids.tolist() for done in engine.generate(requests)}
    for request in requests:
        engine.add(request)
    assert {done.id: done.response_ids.tolist() for done in ended(engine)} == expected
    assert not engine.busy
    assert engine.step() == []


def test_a_later_request_overtakes_where_the_engine_can_and_waits_where_it_cannot(continuous):
    orders = []
    for engine in (continuous, BatchEngine(continuous)):
        engine.add(asked(1, 60))
        engine.add(asked(2, 2))
        first = []
        while not first:
            first = engine.step()
        assert [done.id for done in first] == [2]
        engine.add(asked(3, 2))
        orders.append([done.id for done in ended(engine)])
    assert orders == [[3, 1], [1, 3]]


def test_what_waits_and_what_runs_is_aborted_with_the_tokens_so_far(engine):
    prefix = np.array([7, 8])
    engine.add(asked(1, 60))
    engine.add(asked(2, 2))
    while not engine.step():
        pass
    engine.add(Request(3, PROMPT, SamplingParams(max_tokens=60), prefix_ids=prefix))
    engine.abort([3])
    engine.abort([99])
    done = {one.id: one for one in ended(engine)}
    assert done[3].finish_reason == "abort" and done[3].response_ids.tolist() == [7, 8]
    assert done[1].finish_reason == "length" and len(done[1].response_ids) == 60


def test_all_are_aborted_without_numbers(engine):
    engine.add(asked(1, 60))
    engine.add(asked(2, 2))
    while not engine.step():
        pass
    engine.add(asked(3, 60))
    engine.abort()
    done = ended(engine)
    assert {one.id: one.finish_reason for one in done} == {1: "abort", 3: "abort"}
    assert all(len(one.response_ids) < 60 for one in done)


def test_an_engine_without_its_weights_refuses_at_once(engine):
    engine.begin_update(2)
    with pytest.raises(HybridFlowError, match="version 2 was begun"):
        engine.add(asked(1, 4))
    give_weights(engine, reference().parameters, 1)
    engine.add(asked(1, 4))
    assert len(ended(engine)) == 1
