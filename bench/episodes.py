"""Episodes whose tools take their time: 64 of 4 turns, in rounds and free, beside tools that run one after another.

python bench/episodes.py

Tools wait as drawn from a lognormal distribution (mean 0.2 s, sigma 1, seed 0). The engine is simulated, so that a machine
with two cores shows the scheduling alone: a turn is 50 steps of 1 ms, whatever runs beside it. Episodes are played by a worker
on Ray. The baselines follow from the drawn times: tools one after another, rounds that lose nothing, and the slowest episode.
Then a tool that never answers: how long after its time limit its episode ends. Last the embedded engine, with a tiny model:
from an answer to its request. One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from common import emit

from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.contracts.worker import RankContext, Worker, register
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.plugins.resolve import build_tokenizer
from hybridflow.core.values.outcomes import COMPLETE, FAILED_TOOL
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.kit.continuous import ContinuousEngine

FOLDER = str(Path(__file__).parent)
EPISODES, TURNS = 64, 4
MEAN_S, SIGMA = 0.2, 1.0
STEPS, STEP_S = 50, 0.001
"""Of a turn in the engine."""
WAITS = np.random.default_rng(0).lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA, (EPISODES, TURNS))
"""Seconds of the tool after each turn."""
REACHED, FREE, P99_MS, LATE_S = 0.8, 1.15, 20.0, 0.2
"""Bars: a share of what loses nothing; of free episodes over the slowest one; from an answer to its request; from a time limit
to the end of the episode."""
LIMIT_S = 1.0
"""Time limit of an answer, beside a tool that never gives one."""
TOKEN, STOP = 4, 2
answered: dict[int, float] = {}
"""Row -> when its tool was ready, in the worker's process."""


class Waits(Environment):
    def reset(self, start):
        self.row = start.meta["row"]
        return Answer()

    def step(self, turn):
        time.sleep(WAITS[self.row, turn.number])
        answered[self.row] = time.perf_counter()
        return Answer("1", done=turn.number == TURNS - 1)


class Hangs(Environment):
    """The first row's tool never answers; `close` ends what it waits for."""

    ended_after: float | None = None

    def reset(self, start):
        self.row = start.meta["row"]
        self.gone = threading.Event()
        return Answer()

    def step(self, turn):
        if self.row == 0:
            self.asked = time.perf_counter()
            self.gone.wait()
        return Answer("1", done=turn.number == TURNS - 1)

    def close(self):
        if self.row == 0:
            Hangs.ended_after = time.perf_counter() - self.asked
        self.gone.set()


class Quick(Environment):
    """Answers at once, and says when."""

    stops = ("=",)

    def reset(self, start):
        self.seed = start.seed
        return Answer("1+")

    def step(self, turn):
        answered[self.seed] = time.perf_counter()
        return Answer("2+", done=turn.number == TURNS - 1)


class Simulated(ContinuousEngine):
    """Turns take equally long, whatever runs beside them."""

    def start(self):
        self.max_positions, self.vocab, self.version = None, 16, 1
        self.left: dict[int, int] = {}
        self.delays: list[float] = []

    def layout(self):
        raise NotImplementedError("it has no weights")

    def receive(self, name, box, tensor):
        raise NotImplementedError("it has no weights")

    def enter(self, request):
        self.left[request.id] = STEPS
        if request.id in answered:
            self.delays.append(time.perf_counter() - answered.pop(request.id))

    def advance(self):
        time.sleep(STEP_S)
        self.left = {number: left - 1 for number, left in self.left.items()}
        ended = [number for number, left in self.left.items() if left == 0]
        for number in ended:
            del self.left[number]
            yield self.completion(self.running[number], [TOKEN, STOP], [-0.5, -0.5], "stop")

    def leave(self, ids):
        return ()


def play(free: bool, name: str, **settings: Any) -> dict[str, Any]:
    """Seconds of all episodes, and those from each answer to its request; of a tool that hangs, until it was given up."""
    answered.clear()
    alone = ParallelLayout()
    context = RankContext(
        "actor", 0, alone, torch.device("cpu"), generation=generation_layout(alone)
    )
    engine = Simulated(None, None, context)
    engine.start()
    tokenizer = build_tokenizer(TokenizerConfig(characters="0123456789+="), None, list)
    section = EnvironmentSection(f"episodes:{name}", TURNS, free=free, at_once=EPISODES, **settings)
    sampling = SamplingParams(64, stop_token_ids=(STOP,))
    requests = [Request(row, np.array([1, TOKEN]), sampling, row) for row in range(EPISODES)]
    metas = [{"row": row} for row in range(EPISODES)]

    started = time.perf_counter()
    batch = run_episodes(engine, requests, metas, Episodes(section, tokenizer), context)
    seconds = time.perf_counter() - started
    outcomes = batch["outcome"].values
    assert outcomes == [COMPLETE] * EPISODES or outcomes == [FAILED_TOOL] + [COMPLETE] * (
        EPISODES - 1
    )
    return {"seconds": seconds, "delays": engine.delays, "ended_after": Hangs.ended_after}


class Player(Worker):
    @register(Protocol.RANK_ZERO)
    def play(self, free: bool, name: str = "Waits", **settings: Any) -> dict:
        sys.path.insert(0, FOLDER)
        import episodes  # this file, as a module, where the environment is looked for too

        return episodes.play(free, name, **settings)


def embedded() -> list[float]:
    """Seconds from each answer to its request, of free episodes with a tiny model."""
    import episodes

    from hybridflow.algorithms.grpo import GRPO, GRPOConfig
    from hybridflow.kit.testing import TinyRun

    tables = {
        "environment": {"name": "episodes:Quick", "max_turns": TURNS, "free": True},
        "sampling": {"max_tokens": 24, "logit_bias": {"14": 2.0}},
        "reward": {"function": "environment"},
    }
    delays = []
    with TinyRun(GRPO(GRPOConfig(prompts_per_step=16, group_size=4)), tables) as run:
        engine = run.worker("actor").engine
        add = engine.add

        def added(request):
            if request.seed in episodes.answered:
                delays.append(time.perf_counter() - episodes.answered.pop(request.seed))
            add(request)

        run.step()
        engine.add = added
        episodes.answered.clear()
        run.step()
    return delays


def main() -> int:
    from hybridflow.backends.ray.config import RayConfig
    from hybridflow.backends.ray.runtime import RayRuntime

    turn = STEPS * STEP_S
    serial = TURNS * turn + float(WAITS.sum())
    rounds = TURNS * turn + float(WAITS.max(0).sum())
    slowest = TURNS * turn + float(WAITS.sum(1).max())

    runtime = RayRuntime(RayConfig(object_store_gb=0.2))
    runtime.start()
    group = WorkerGroup(Player, Pool.launch(ResourcePool("bench", (1,)), runtime))
    played = {free: group.play(free).result() for free in (False, True)}
    rule = {"timeout_s": LIMIT_S, "on_failure": FailureRule(mask=True)}
    hung = {free: group.play(free, "Hangs", **rule).result() for free in (False, True)}
    runtime.shutdown()

    in_rounds, free = played[False]["seconds"], played[True]["seconds"]
    met = emit("tools one after another", serial, "s (computed)")
    met &= emit(
        "rounds",
        in_rounds,
        "s",
        ratio=serial / in_rounds,
        against="one after another",
        bar=REACHED * serial / rounds,
    )
    met &= emit(
        "free",
        free,
        "s",
        ratio=serial / free,
        against="one after another",
        bar=REACHED * serial / slowest,
    )
    met &= emit(
        "free",
        free,
        "s",
        ratio=free / slowest,
        against="the slowest episode",
        bar=FREE,
        at_most=True,
    )
    delay = float(np.quantile(played[True]["delays"], 0.99)) * 1e3
    met &= emit("from an answer to its request, p99", delay, "ms", bar=P99_MS, at_most=True)
    for free, how in ((False, "in rounds"), (True, "free")):
        late = hung[free]["ended_after"] - LIMIT_S
        met &= emit(
            f"from the time limit of a tool to the end of its episode, {how}",
            late,
            "s",
            bar=LATE_S,
            at_most=True,
        )
    delays = embedded()
    emit(
        "from an answer to its request, embedded, p99", float(np.quantile(delays, 0.99)) * 1e3, "ms"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
