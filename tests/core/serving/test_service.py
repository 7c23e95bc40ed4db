"""The rollout service: futures, streams in completion order, aborts, updates beside running requests."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from helpers.batch_engine import BatchEngine

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Completion, Request, SamplingParams
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.serving.service import RolloutService
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import one_rank
from hybridflow.kit.testing.engine_base import PROMPTS, give_weights, requests
from hybridflow.kit.testing.models import reference


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    logs = str(tmp_path_factory.mktemp("logs"))
    with one_rank() as context:
        ref = reference("qwen2")
        made = {}
        for kind in ("shared", "own"):
            config = TransformersEngineConfig()
            if kind == "own":
                made[kind] = HostedEngine(TransformersEngine, ref.spec, config, context, logs)
            else:
                made[kind] = TransformersEngine(ref.spec, config, context)
            made[kind].start()
            give_weights(made[kind], ref.parameters, 1)
        made["batch"] = BatchEngine(made["shared"])
        yield made
        made["own"].close()


@pytest.fixture(params=["shared", "own", "batch"])
def engine(request, engines):
    return engines[request.param]


def test_answers_are_those_of_generate(engine):
    asked = requests(PROMPTS, SamplingParams(max_tokens=10))
    expected = {c.id: c for c in engine.generate(asked)}
    with RolloutService(engine) as service:
        futures = {r.id: service.submit(r) for r in asked}
        for at, future in futures.items():
            assert future.result(20).response_ids.tolist() == expected[at].response_ids.tolist()
            np.testing.assert_allclose(future.result().logprobs, expected[at].logprobs, atol=1e-5)


def test_a_stream_gives_what_finishes_first_first(engine):
    lengths = [120, 5, 30]
    asked = [
        Request(at, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=n))
        for at, n in enumerate(lengths)
    ]
    with RolloutService(engine) as service:
        assert [c.id for c in service.stream(asked)] == [1, 2, 0]


def test_a_request_joins_those_that_run(engines):
    """The later one is shorter, and ends first: it did not wait."""
    for engine in (engines["shared"], engines["own"]):
        with RolloutService(engine) as service:
            long = service.submit(
                Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120))
            )
            short = service.submit(Request(2, np.asarray(PROMPTS[0]), SamplingParams(max_tokens=3)))
            assert len(short.result(20).response_ids) == 3
            assert not long.done()
            assert len(long.result(20).response_ids) == 120


def test_aborted_requests_come_back_with_what_they_have(engine):
    whole = engine.generate(
        [Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120), seed=3)]
    )[0]
    with RolloutService(engine) as service:
        long = service.submit(
            Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120), seed=3)
        )
        service.abort([1, 99])
        done = long.result(20)
    assert done.finish_reason in ("abort", "length")
    assert done.response_ids.tolist() == whole.response_ids[: len(done.response_ids)].tolist()


def test_closing_aborts_what_runs_and_refuses_what_comes(engine):
    service = RolloutService(engine)
    long = service.submit(Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120)))
    service.close()
    assert isinstance(long.result(1), Completion)
    with pytest.raises(HybridFlowError, match="closed"):
        service.submit(Request(2, np.asarray(PROMPTS[1]), SamplingParams()))
    service.close()


def test_what_is_refused_fails_its_own_future_alone(engine):
    with RolloutService(engine) as service:
        good = service.submit(Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=5)))
        if engine.continuous:
            bad = service.submit(Request(2, np.asarray([], np.int64), SamplingParams(max_tokens=5)))
            with pytest.raises(HybridFlowError, match="request 2: the prompt is empty"):
                bad.result(20)
        assert len(good.result(20).response_ids) == 5


def test_weights_change_under_a_running_service(engine):
    """Where the engine cannot change them in flight, running requests end first; nobody loses an answer."""
    second = reference("qwen2", seed=1)
    with RolloutService(engine) as service:
        long = service.submit(Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120)))
        with service.update(2) as inner:
            for name, values in second.parameters.items():
                from hybridflow.core.values.weights import Box

                inner.receive(name, Box.full(values.shape), values)
        after = service.submit(
            Request(2, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=8, temperature=0.0))
        )
        assert after.result(20).response_ids.tolist() == second.greedy(np.asarray(PROMPTS[1]), 8)
        versions = long.result(20).weight_version.tolist()
        assert versions == sorted(versions) and set(versions) <= {1, 2} and len(versions) == 120
    give_weights(engine, reference("qwen2").parameters, 1)


def test_an_update_that_fails_leaves_an_engine_that_refuses(engine):
    with RolloutService(engine) as service:
        with pytest.raises(RuntimeError, match="no weights"), service.update(2):
            raise RuntimeError("no weights")
        refused = service.submit(Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=5)))
        with pytest.raises(HybridFlowError, match="begun and not ended"):
            refused.result(20)
    give_weights(engine, reference("qwen2").parameters, 1)


def test_closing_after_an_update_that_failed_under_running_requests_answers_them_and_ends(engines):
    for engine in (engines["shared"], engines["own"]):
        service = RolloutService(engine)
        long = service.submit(Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120)))
        with pytest.raises(RuntimeError, match="no weights"), service.update(2):
            raise RuntimeError("no weights")
        service.close()
        if (
            long.exception(1) is None
        ):  # it had ended before the update began, or was aborted by the close
            assert long.result().finish_reason in ("length", "abort")
        else:
            assert "begun and not ended" in str(long.exception())
        give_weights(engine, reference("qwen2").parameters, 1)


def test_ids_are_unique_among_running_requests(engine):
    with RolloutService(engine) as service:
        asked = Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=100))
        first, twin = service.submit(asked), service.submit(attrs.evolve(asked, seed=1))
        with pytest.raises(HybridFlowError, match="id is running"):
            twin.result(20)
        assert len(first.result(20).response_ids) == 100


def test_what_a_failed_update_left_running_is_over_before_the_next_request_enters(engines):
    """Also a request that had not entered the engine's process yet when the update began."""
    second = reference("qwen2", seed=1)
    for engine in (engines["shared"], engines["own"]):
        engine.add(Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=120)))
        engine.begin_update(2)
        engine.abort()
        engine.disown()
        give_weights(engine, second.parameters, 3)
        with RolloutService(engine) as service:
            answer = service.submit(
                Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=8, temperature=0.0))
            )
            assert answer.result(20).response_ids.tolist() == second.greedy(
                np.asarray(PROMPTS[1]), 8
            )
        give_weights(engine, reference("qwen2").parameters, 1)
