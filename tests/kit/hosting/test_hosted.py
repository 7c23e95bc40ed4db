"""An engine in a process of its own does what one in this process does, and loses nothing with it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import attrs
import numpy as np
import pytest
import torch
from helpers import hosted_jobs as jobs
from helpers.counting import Broken, Counting, Slow, SlowInFlight, update
from helpers.kept_engines import kept_engines
from helpers.paths import matrix

import hybridflow.kit.hosting.hosted as hosted_module
import hybridflow.kit.hosting.process as process_module
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.hosting.process import EngineDied, EngineProcess
from hybridflow.kit.testing import RolloutEngineConformance, one_rank
from hybridflow.kit.testing.engine_base import PROMPTS, give_weights
from hybridflow.kit.testing.models import reference

REF = reference("qwen2")


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    """One process per model serves all tests."""
    logs, config = str(tmp_path_factory.mktemp("logs")), TransformersEngineConfig()
    with kept_engines(
        lambda spec, context: HostedEngine(TransformersEngine, spec, config, context, logs)
    ) as start:
        yield start


class TestHosted(RolloutEngineConformance):
    @pytest.fixture
    def start(self, hosted):
        return hosted


@pytest.fixture
def make(tmp_path):
    """make(engine_class=..., **config) -> a HostedEngine; ended with the test."""
    made: list[HostedEngine] = []
    with one_rank() as context:

        def make(engine_class=TransformersEngine, **config) -> HostedEngine:
            made.append(
                HostedEngine(
                    engine_class,
                    REF.spec,
                    TransformersEngineConfig(**config),
                    context,
                    str(tmp_path),
                )
            )
            return made[-1]

        yield make
        for engine in made:
            engine.close()


@pytest.fixture
def speaking(make):
    def speaking(**config) -> HostedEngine:
        engine = make(**config)
        engine.start()
        give_weights(engine, REF.parameters, 1)
        return engine

    return speaking


@pytest.fixture
def counting(make):
    def counting(**config) -> HostedEngine:
        engine = make(SlowInFlight, **config)
        engine.start()
        update(engine, 1, 1.0)
        return engine

    return counting


def asked(count: int, tokens: int = 30) -> list[Request]:
    """The first ends early."""
    return [
        Request(
            at, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=3 if at == 0 else tokens), seed=at
        )
        for at in range(count)
    ]


def kill(engine: HostedEngine, how: signal.Signals = signal.SIGKILL) -> int:
    assert engine.process is not None
    os.kill(engine.process.pid, how)
    return engine.process.pid


def same(found, expected) -> bool:
    return all(
        f.response_ids.tolist() == e.response_ids.tolist()
        for f, e in zip(found, expected, strict=True)
    )


@matrix
def test_killed_in_mid_generation_every_request_is_answered_once_and_alike(speaking, capsys):
    engine = speaking(restarts=2)
    expected = engine.generate(asked(12, 100))
    for number in (1, 2):
        stream = engine.submit(asked(12, 100))
        done = [next(stream)]
        pid = kill(engine)
        done += list(stream)
        assert sorted(c.id for c in done) == list(range(12))
        assert same(sorted(done, key=lambda c: c.id), expected)
        assert all((c.weight_version == 1).all() for c in done)
        assert engine.restarts == number and engine.figures() == {"engine_restarts": 1.0}
        assert engine.process is not None and engine.process.pid != pid
    said = capsys.readouterr().out
    assert (
        "was killed by SIGKILL" in said
        and "restart 2 of 2" in said
        and "--- engine started" in said
    )


def test_without_restarts_the_death_is_told_with_the_tail_of_the_log(counting, tmp_path):
    engine = counting()
    stream = engine.submit(asked(4))
    next(stream)
    kill(engine, signal.SIGABRT)
    with pytest.raises(
        EngineDied,
        match=r"SIGABRT.*engine-conformance-0\.log(?s:.*)rollout\.restarts > 0",
    ):
        list(stream)
    assert (tmp_path / "engine-conformance-0.log").exists()


@matrix
def test_restarts_are_used_up(counting):
    engine = counting(restarts=1)
    for _ in range(2):
        stream = engine.submit(asked(4))
        next(stream)
        kill(engine)
        if engine.restarts == 0:
            assert len(list(stream)) == 3
    with pytest.raises(EngineDied, match="used up"):
        list(stream)


@pytest.mark.parametrize("early", [True, False])
def test_killed_while_it_starts_it_starts_again(make, monkeypatch, early):
    """Before or after it was told what to start."""
    started, killed = EngineProcess.started, []

    def kill_first(process, *arguments):
        if not killed:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        return started(process, *arguments)

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            if not killed:
                killed.append(self.pid)
                self.kill()
                self.wait()

    if early:
        monkeypatch.setattr(process_module.subprocess, "Popen", Popen)
    else:
        monkeypatch.setattr(EngineProcess, "started", kill_first)
    engine = make(SlowInFlight, restarts=1)
    engine.start()
    assert engine.process.pid != killed[0] and engine.figures() == {"engine_restarts": 1.0}
    update(engine, 1, 1.0)
    assert len(engine.generate(asked(4))) == 4

    killed.clear()
    with pytest.raises(EngineDied, match=r"SIGKILL(?s:.*)rollout\.restarts > 0"):
        make(SlowInFlight, restarts=0).start()


def test_what_cannot_start_is_not_started_again(make):
    engine = make(Broken, restarts=5)
    with pytest.raises(EngineDied, match=r"failed: .*it cannot start"):
        engine.start()
    assert engine.restarts == 0


def test_killed_between_two_calls_it_comes_back_with_its_weights(counting):
    engine = counting(restarts=1)
    expected = engine.generate(asked(4))
    kill(engine)
    assert same(engine.generate(asked(4)), expected)


@matrix
def test_killed_during_an_update_it_gets_all_of_the_new_weights(speaking):
    engine, second = speaking(restarts=1), reference("qwen2", seed=1)
    engine.begin_update(2)
    names = list(engine.layout().params)
    for at, name in enumerate(names):
        if at == len(names) // 2:
            kill(engine)
            time.sleep(0.1)
        engine.receive(name, Box.full(second.parameters[name].shape), second.parameters[name])
    engine.end_update()
    greedy = Request(1, np.asarray(PROMPTS[1]), SamplingParams(max_tokens=12, temperature=0.0))
    [done] = engine.generate([greedy])
    assert done.response_ids.tolist() == second.greedy(np.asarray(PROMPTS[1]), 12)
    assert set(done.weight_version.tolist()) == {2} and engine.restarts == 1


@matrix
def test_killed_during_an_update_without_restarts_the_sync_fails(speaking):
    engine = speaking()
    engine.begin_update(2)
    kill(engine)
    with pytest.raises(EngineDied, match="SIGKILL"):
        for name, values in REF.parameters.items():
            if name in engine.layout().params:
                engine.receive(name, Box.full(values.shape), values)
        engine.end_update()


def test_an_engine_that_comes_back_with_other_weights_is_not_believed(counting):
    engine = counting(restarts=1)
    engine.generate(asked(4))
    for values in engine._kept.values():
        values.add_(torch.randn_like(values))
    kill(engine)
    with pytest.raises(HybridFlowError, match="its weights did not come back"):
        engine.generate(asked(4))


@matrix
def test_killed_in_its_sleep_it_wakes_anew(counting):
    engine = counting(restarts=1)
    expected = engine.generate(asked(4))
    engine.sleep()
    kill(engine)
    engine.wake()
    assert same(engine.generate(asked(4)), expected) and engine.restarts == 1


@matrix
def test_one_that_hangs_counts_as_dead(counting):
    engine = counting(restarts=1, hang_timeout_s=2.0)
    expected = engine.generate(asked(4))
    stream = engine.submit(asked(4))
    done = [next(stream)]
    kill(engine, signal.SIGSTOP)
    done += list(stream)
    assert same(sorted(done, key=lambda c: c.id), expected)


def test_a_nudge_ends_a_step_that_waits_and_is_no_answer(counting, monkeypatch):
    engine = counting()
    expected = engine.generate(asked(2))
    monkeypatch.setattr(hosted_module, "LOOK_S", None)  # it would wait for ever
    steps: list = []
    waits = threading.Thread(target=lambda: steps.append(engine.advance()), daemon=True)
    waits.start()
    engine.nudge()
    waits.join(60)
    assert steps == [[]]
    engine.nudge()
    assert same(engine.generate(asked(2)), expected)


def test_closing_ends_the_process(make):
    engine = make(Counting)
    engine.start()
    assert engine.process is not None
    process = engine.process.process
    assert process.poll() is None
    engine.close()
    engine.close()
    assert process.poll() is not None


def test_bad_requests_are_refused_before_they_reach_the_process(counting):
    engine = counting()
    with pytest.raises(HybridFlowError, match="request 3: the prompt is empty"):
        engine.submit([attrs.evolve(asked(1)[0], id=3, prompt_ids=np.asarray([], np.int64))])
    assert len(engine.generate(asked(2))) == 2


def test_weights_of_an_engine_that_cannot_change_them_in_flight_wait_in_the_worker_too(make):
    engine = make(Slow)
    engine.start()
    update(engine, 1, 1.0)
    stream = engine.submit(asked(4))
    next(stream)
    with pytest.raises(HybridFlowError, match="a weight update while sequences run"):
        engine.begin_update(2)
    assert len(list(stream)) == 3
    update(engine, 2, 2.0)
    assert set(engine.generate(asked(1))[0].weight_version.tolist()) == {2}


@matrix
def test_two_ranks_bring_their_own_weights_and_come_back_with_them(ranks, tmp_path):
    """Tokens count on by step[0], which the first rank brings; logprobs are -step[1], of the second."""
    for found in ranks(jobs.life, 2, str(tmp_path)):
        held, *answers, restarts = found
        assert held == {0: ["step"], 1: ["step"]}
        assert answers == [
            ([7, 9], [-0.5, -0.5]),
            ([7, 9], [-0.5, -0.5]),
            ([8, 11], [-0.75, -0.75]),
            ([9, 13], [-1.0, -1.0]),
        ]
        assert restarts == 2


def test_what_the_engine_refuses_of_one_rank_is_told_to_both(ranks, tmp_path):
    first, second = ranks(jobs.refusal, 2, str(tmp_path))
    assert first[0] == "on another rank of the replica: rank 1: 1000.0 is no step"
    assert second[0] == "rank 1: 1000.0 is no step"
    assert first[1] == second[1] == "([7, 9], [-0.5, -0.5])"


def test_without_restarts_both_ranks_are_told_of_the_death(ranks, tmp_path):
    for told in ranks(jobs.used_up, 2, str(tmp_path)):
        assert told.startswith("EngineDied: the process of the rollout engine")
        assert "was killed by SIGKILL" in told and "rollout.restarts > 0" in told


def test_a_replica_may_be_of_any_ranks_each_with_the_boxes_of_its_place(ranks, tmp_path):
    """Of a trainer with tp 4, zero-redundancy groups are ranks 0 and 2, and ranks 1 and 3 (paper, section 5.3)."""
    found = ranks(jobs.apart, 4, str(tmp_path))
    first, second = jobs.HALVES
    for rank, (held, replica, answer) in enumerate(found):
        assert held == {0: first, 1: first, 2: second, 3: second}
        assert replica == [rank % 2, rank % 2 + 2]
        assert answer == [([7, 9], [-0.5, -0.5]), ([8, 11], [-0.75, -0.75])][rank % 2]
