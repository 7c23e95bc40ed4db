"""The smallest rollout engine: it counts on from the last token, by the weight that it holds."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.core.contracts.rollout import Completion, Request, SamplingParams
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.hosting.bucket import Bucket
from hybridflow.kit.hosting.hostable import Hostable
from hybridflow.kit.hosting.process import EngineProcess

MODEL = ModelSpec({"model_type": "counting", "vocab_size": 50}, None, 0)
STEP = Box.full((2,))


class Counting(ContinuousEngine, Hostable):
    """A token per request and call of `advance`: the last one plus step[0], of logprob -step[1]."""

    max_positions = 40
    vocab = 50

    def start(self) -> None:
        self.made: dict[int, tuple[list[int], list[int]]] = {}
        self.step_of = torch.zeros(2)

    def layout(self) -> WeightLayout:
        return WeightLayout({"step": Param((2,), torch.float32)}, {0: {"step": (STEP,)}})

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        self.check_updating(name)
        self.step_of[box.slices()] = tensor

    def end_update(self) -> None:
        self.check_updating("end_update")
        super().end_update()

    def enter(self, request: Request) -> None:
        self.made[request.id] = ([], [])

    def advance(self) -> list[Completion]:
        assert self.running
        done = []
        for request in list(self.running.values()):
            ids, versions = self.made[request.id]
            ids.append(int([*request.context(), *ids][-1] + self.step_of[0]))
            versions.append(self.version)
            before = 0 if request.prefix_ids is None else len(request.prefix_ids)
            if ids[-1] in request.sampling.stop_token_ids:
                done.append(self.said(request, "stop"))
            elif before + len(ids) == request.sampling.max_tokens:
                done.append(self.said(request, "length"))
        return done

    def leave(self, ids) -> list[Completion]:
        return [self.said(self.running[i], "abort") for i in ids]

    def said(self, request: Request, reason: str) -> Completion:
        ids, versions = self.made.pop(request.id)
        logprobs = [-float(self.step_of[1])] * len(ids)
        return self.completion(request, ids, logprobs, reason, np.asarray(versions, np.int64))


class InFlight(Counting):
    inflight = True


class Slow(Counting):
    """One that can be met in the middle of an answer. Its process starts sooner than that of one with a model."""

    def advance(self) -> list[Completion]:
        time.sleep(0.02)
        return super().advance()


class SlowInFlight(Slow, InFlight):
    pass


def context() -> RankContext:
    return RankContext("counter", 0, ParallelLayout(), torch.device("cpu"))


def counting(kind: type[Counting] = Counting, step: float = 1.0) -> Counting:
    """One that is started and has weights, of version 1."""
    engine = kind(MODEL, None, context())
    engine.start()
    update(engine, 1, step)
    return engine


def update(engine: Counting, version: int, step: float) -> None:
    engine.begin_update(version)
    engine.receive("step", STEP, torch.tensor([step, 0.5]))
    engine.end_update()


def count_from(first: int, number: int = 0, tokens: int = 3, **given) -> Request:
    """A request whose prompt is the token `first`; `given`: of SamplingParams, or prefix_*."""
    names = [name for name in given if name.startswith("prefix_")]
    prefix = {name: np.asarray(given.pop(name)) for name in names}
    sampling = SamplingParams(max_tokens=tokens, **given)
    return Request(number, np.array([first]), sampling, **prefix)


def setup_of(bucket: Bucket, engine_class: type = Counting, tp: int = 1) -> dict[str, Any]:
    """What the worker sends to a process that is to run the engine."""
    place = {"role": "counter", "device": "cpu", "seed": 0, "tp": tp}
    engine = {"engine_class": engine_class, "model": MODEL, "config": None}
    door = (f"\0hybridflow-test-{secrets.token_hex(8)}", b"key")
    return {**engine, "place": place, "bucket": bucket.handle(), "door": door}


def counting_process(
    log: Path,
    engine_class: type = Counting,
    **environment: str,
) -> tuple[EngineProcess, Bucket]:
    """A process that was told to start the engine, and the bucket for its weights."""
    bucket = Bucket(torch.device("cpu"), 64)
    process = EngineProcess(log, environment)
    process.connection.send(setup_of(bucket, engine_class))
    return process, bucket


class Broken(Slow):
    """An engine that cannot start."""

    def start(self):
        raise RuntimeError("it cannot start")
