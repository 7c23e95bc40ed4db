"""Two ranks that share the process of one engine, each with a bucket of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from helpers.counting import Counting, count_from
from helpers.engine_jobs import context_of
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.hosting.bucket import BucketReader, Load
from hybridflow.kit.hosting.hosted import HostedEngine
from hybridflow.kit.testing import tiny_config

HALVES = (Box((0,), (1,)), Box((1,), (2,)))
"""What each of two devices holds of the weight "step": step[0] and step[1]."""


class OnTwoDevices(Counting):
    """Its step[0] comes by the first rank's bucket, and step[1] by the second's."""

    def layout(self) -> WeightLayout:
        held = {place: {"step": (box,)} for place, box in enumerate(HALVES)}
        return WeightLayout({"step": Param((2,), torch.float32)}, held)

    def take(self, place: int, reader: BucketReader, load: Load) -> None:
        for piece, values in reader.take(load):
            if not 0 <= float(values[0]) < 100:
                raise HybridFlowError(f"rank {place}: {float(values[0])} is no step")
            assert piece.box == HALVES[place]
            self.receive(piece.name, piece.box, values)


def hosted(
    rank: int, logs: str, restarts: int = 1, context: RankContext | None = None
) -> HostedEngine:
    config = TransformersEngineConfig(own_process=True, restarts=restarts)
    model = ModelSpec({**tiny_config(), "vocab_size": 50}, None, 0)
    engine = HostedEngine(OnTwoDevices, model, config, context or context_of(rank, 2), logs)
    engine.start()
    return engine


def bring(engine: HostedEngine, rank: int, version: int, step: float, kill: bool = False) -> None:
    """An update in which each rank brings its own half; `kill`: the process ends in its midst."""
    engine.begin_update(version)
    if kill:
        end(engine)
    engine.receive("step", HALVES[rank], torch.tensor([(step, 0.25 * step)[rank]]))
    engine.end_update()


def end(engine: HostedEngine) -> None:
    """Kill the engine's process; every rank returns when it is gone."""
    if engine.leads:
        assert engine.process is not None
        os.kill(engine.process.pid, signal.SIGKILL)
    engine.context.sum([0.0])
    time.sleep(0.1)


def said(engine: HostedEngine) -> tuple[list[int], list[float]]:
    [done] = engine.generate([count_from(5, 1, tokens=2)])
    return done.response_ids.tolist(), done.logprobs.tolist()


def life(rank: int, world: int, logs: str) -> list[Any]:
    """What an engine says after an update, a death in its sleep, one in an update, and another update."""
    engine = hosted(rank, logs, restarts=2)
    try:
        held = {place: list(boxes) for place, boxes in engine.layout().held.items()}
        answers: list[Any] = [held]
        bring(engine, rank, 1, 2.0)
        answers.append(said(engine))
        end(engine)
        answers.append(said(engine))
        bring(engine, rank, 2, 3.0, kill=True)
        answers.append(said(engine))
        bring(engine, rank, 3, 4.0)
        answers.append(said(engine))
        return [*answers, engine.restarts]
    finally:
        engine.close()


def refusal(rank: int, world: int, logs: str) -> list[str]:
    """What each rank is told when the engine refuses the second rank's half, and what it says after a good update."""
    engine = hosted(rank, logs, restarts=0)
    errors = []
    try:
        engine.begin_update(1)
        engine.receive("step", HALVES[rank], torch.tensor([(2.0, 1000.0)[rank]]))
        try:
            engine.end_update()
        except HybridFlowError as error:
            errors.append(str(error))
        bring(engine, rank, 1, 2.0)
        return [*errors, str(said(engine))]
    finally:
        engine.close()


def used_up(rank: int, world: int, logs: str) -> str:
    """What each rank is told when the process dies and no restart is left."""
    engine = hosted(rank, logs, restarts=0)
    try:
        bring(engine, rank, 1, 2.0)
        end(engine)
        said(engine)
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return "nothing"


def apart(rank: int, world: int, logs: str) -> tuple[dict[int, Box], list[int], Any]:
    """What a rank of four holds, with whom, and what its replica says: tp 2 out of a trainer's tp 4."""
    train = ParallelLayout(tp=4)
    generation = generation_layout(train, tp=2)
    context = RankContext("actor", rank, train, torch.device("cpu"), 0, generation)
    engine = hosted(rank, logs, context=context)
    try:
        held = {each: boxes["step"][0] for each, boxes in engine.layout().held.items()}
        replica = generation.replica_of[rank]
        place = generation.ranks(replica).index(rank)
        # The replicas get other steps: 2 and 3.
        bring(engine, place, 1, 2.0 + replica)
        return held, generation.ranks(replica), said(engine)
    finally:
        engine.close()
