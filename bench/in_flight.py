"""Engines in a pool of their own that take newer weights while they generate (run.in_flight = "recompute"), beside steps that
are generated and trained one after the other.

python bench/in_flight.py                                     all parts; about fourteen minutes
python bench/in_flight.py --only schedules --schedules 300    so many random schedules, in place of 12; --first 150 begins at
                                                              that one, so that two can run side by side

On two cores real work of engine and trainer does not fit side by side, so that engine and loss sleep in its place: it shows the
order of the calls, under the real controller, on Ray. The engine makes a token per step for as many sequences as it has places
for; lengths are drawn from a lognormal distribution, sigma 1.

steps        seconds of a step, places for one step's sequences (the bars), and what the planner says of it beforehand; mean
             trained length; beside it, without a bar, a page that reads its scores before it goes on, as dynamic sampling
             (DAPO) does
limit        places for a quarter of a step's sequences, so that engines are the limit: the share of time in which they work
schedules    drawn bounds, sizes, replicas and their ranks, lengths and naps, with the embedded engine: no token lags by more
             than the bound, every drawn row is trained once, and the tokens, by weights that do not move, are those of a run
             without a bound; some token lags by each bound

One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import ahead
import attrs
import numpy as np
import torch
from ahead import LONGEST, RAY
from carried import SAME_LENGTH, SimulatedEngine
from common import emit, register_engine

from hybridflow.backends.ray.config import RayConfig
from hybridflow.backends.ray.runtime import RayRuntime
from hybridflow.kit.testing.runs import MODEL, TinyRun
from hybridflow.planner.overlap import Engines, simulate
from hybridflow.settle.stages import overlay

BARS = {1: 1.6, 2: 2.2, 4: 3.2}
"""run.max_staleness -> how many times faster a step is."""
BUSY = 0.95
FORESEEN = 0.25
"""By how much a step may be apart from what the planner says."""
STEP_S, TRAIN_S = 0.012, 1.2
"""Seconds of the engine's step, and of the loss."""
PROMPTS, GROUP = 16, 4
ROWS = PROMPTS * GROUP
FIRST, STEPS = 4, 16
"""Steps are counted from step FIRST on."""


def lengths_of(step: int) -> np.ndarray:
    """Tokens of each response of a step (ahead.Tailed)."""
    return ahead.lengths_of(step, ROWS)


class SleepingEngine(SimulatedEngine):
    """It tells the seconds of all its steps up to now."""

    worked = 0.0

    def advance(self):
        began = time.perf_counter()
        time.sleep(STEP_S)
        done = super().advance()
        self.worked += time.perf_counter() - began
        return done

    def figures(self) -> dict[str, float]:
        return {"engine_seconds": self.worked}


class Trains(ahead.Sleeps):
    seconds = TRAIN_S


class Tailed(ahead.Tailed):
    loss = Trains


class Early(Tailed):
    reads_scores = True


class Short(ahead.Sleeps):
    seconds = 0.02


class Quick(ahead.Tailed):
    loss = Short


class Drawn(ahead.NapsGRPO):
    """Responses with lengths of their own; what it has generated is kept."""

    made: list[Any]

    def step(self, ctx):
        prompts = ctx.prompts(self.config.prompts_per_step).repeat(self.config.group_size)
        draws = np.random.default_rng(ctx.step).lognormal(1.5, 1.0, prompts.rows)
        lengths = torch.from_numpy(np.clip(draws, 1, 24).astype(np.int64))
        sampling = attrs.evolve(ctx.sampling, ignore_stop=True)
        batch = ctx.actor.generate(prompts.with_columns(max_tokens=lengths), sampling=sampling)
        self.made.append(batch)
        batch = batch.join(ctx.reward.score(batch), ctx.actor.logprobs(batch))
        advantages = ctx.compute(self.advantages, batch)
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update((mini, self.losses()["actor"]))


def apart(staleness: int, algorithm: dict[str, Any], **tables: Any) -> TinyRun:
    """A run on Ray with engines in a pool of their own."""
    run = {"max_staleness": staleness, "samples": 0, **tables.pop("run", {})}
    if staleness:
        run |= {"in_flight": "recompute"}
    return TinyRun(algorithm, overlay({**ahead.APART, **RAY}, {"run": run, **tables}))


class Timed(NamedTuple):
    """Figures of a run's steps, from step FIRST on."""

    seconds: float
    busy: float
    """The share of them in which the engine works."""
    length: float
    """Mean length of a response, in tokens."""
    waited: float
    """Seconds that a step's end waits for pages that read their scores early."""


def timed(staleness: int, name: str, places: int) -> Timed:
    algorithm = {"name": name, "prompts_per_step": PROMPTS, "group_size": GROUP}
    algorithm |= {"correction": "truncate"}
    model = {"config": {**MODEL, "max_position_embeddings": 512}}
    ends: list[float] = []
    tables = {
        "run": {"mismatch_stop": float("inf")},
        "actor": {"model": model, "micro_batch_tokens": 20_000},
        "sampling": {"max_tokens": LONGEST},
        "rollout": {"name": "sleeping", "places": places},
    }
    with apart(staleness, algorithm, **tables) as run:
        metrics = run.steps(STEPS, at_end=lambda: ends.append(time.perf_counter()))
    counted = metrics[FIRST:]
    assert all(values.get("actor/staleness_max", 0.0) <= staleness for values in metrics)
    took = ends[-1] - ends[FIRST - 1]
    # An engine that never stops tells its figures at the end of each step, for the metrics of the next.
    worked = counted[-1]["actor/engine_seconds"] - counted[0]["actor/engine_seconds"]
    busy = worked / (ends[-2] - ends[FIRST - 1])
    length = float(np.mean([values["actor/response_length"] for values in counted]))
    waited = float(np.mean([values.get("end_wait_seconds", 0.0) for values in counted]))
    return Timed(took / len(counted), busy, length, waited)


def steps() -> bool:
    met = True
    found = {k: timed(k, "in_flight:Tailed", ROWS) for k in (0, 1, 2, 4)}
    plain = found[0]
    # All of a step but its generation, as the run without a bound has shown.
    engines = Engines(1, ROWS, STEP_S)
    counted = {"first": FIRST, "steps": STEPS - FIRST}
    rest = plain.seconds - simulate(engines, lengths_of, 0.0, **counted).step
    for staleness, run in found.items():
        met &= emit(
            f"a step, max_staleness {staleness}", run.seconds, "s", ratio=plain.seconds / run.seconds,
            against="max_staleness 0", bar=BARS.get(staleness),
        )  # fmt: skip
        emit("share of time in which the engine works", run.busy, "")
        off = abs(run.length / plain.length - 1)
        met &= emit("mean trained length, apart by", off, "", bar=SAME_LENGTH, at_most=True)
        planned = simulate(engines, lengths_of, rest, staleness=staleness, **counted).step
        apart_by = max(planned / run.seconds, run.seconds / planned) - 1
        met &= emit(
            f"a step as planned, max_staleness {staleness}", planned, "s", ratio=apart_by, against="measured, apart by",
            bar=FORESEEN, at_most=True,
        )  # fmt: skip

    for staleness in (1, 2):
        run = timed(staleness, "in_flight:Early", ROWS)
        emit(
            f"a step whose page reads its scores, max_staleness {staleness}", run.seconds, "s",
            ratio=plain.seconds / run.seconds, against="max_staleness 0",
        )  # fmt: skip
        emit("of it the end waits for pages ahead", run.waited, "s")
    return met


def limit() -> bool:
    run = timed(4, "in_flight:Quick", ROWS // 4)
    emit("a step that engines limit, max_staleness 4", run.seconds, "s")
    return emit("share of time in which the engine works", run.busy, "", bar=BUSY)


def taken(run: TinyRun, count: int) -> tuple[list[float], list[list[int]], list[int]]:
    """(the largest lag of each step, tokens of each response, each row's group) of some steps."""
    run.algorithm.made = []  # type: ignore[attr-defined]
    with run:
        metrics = run.steps(count)
        made = [batch.select(["response_ids", "group"]) for batch in run.algorithm.made]  # type: ignore[attr-defined]
        tokens = [row.tolist() for batch in made for row in batch["response_ids"]]
        groups = [group for batch in made for group in batch["group"].values.tolist()]
    return [values.get("actor/staleness_max", 0.0) for values in metrics], tokens, groups


@contextlib.contextmanager
def one_ray() -> Iterator[None]:
    """A local Ray that runs find connected, and leave up: a start takes as long as a short run."""
    options = {name: value for name, value in RAY["runtime"].items() if name != "name"}
    owner = RayRuntime(RayConfig(**options))
    owner.start()
    try:
        yield
    finally:
        owner.shutdown()


def schedules(count: int, first: int) -> bool:
    with one_ray():
        return drawn(count, first)


def drawn(count: int, first: int) -> bool:
    bound = once = same = 0
    reached = set()
    for number in range(first, first + count):
        draws = random.Random(number)
        staleness = 1 + number % 4
        size = draws.choice([2, 4])
        algorithm = {"name": "in_flight:Drawn", "prompts_per_step": draws.choice([4, 8])}
        algorithm |= {"group_size": size, "mini_batch_size": draws.choice([0, 2 * size])}
        algorithm |= {"correction": draws.choice(["truncate", "mask"])}
        tables: dict[str, Any] = {
            "sampling": {"max_tokens": 24},
            "rollout": {"max_sequences": draws.choice([0, 6])},
            "actor": {"optimizer": {"lr": 1e-30}},
            "reward": {"function": "ahead:score"},
        }
        replicas, tp = draws.choice([(1, 1), (2, 1), (2, 1), (1, 2)])
        pools = {
            "pools": {"main": [1], "engines": [replicas * tp]},
            "actor": {"generation": {"pool": "engines", "tp": tp}},
        }
        run = apart(staleness, algorithm, **overlay(tables, pools))
        lags, tokens, groups = taken(run, 8)
        ahead.napping = False
        _, plain, _ = taken(TinyRun(algorithm, {"run": {"samples": 0}, **tables}), 8)
        ahead.napping = True

        bound += max(lags) <= staleness
        each = [group for group in range(len(groups) // size) for _ in range(size)]
        once += groups == each
        same += tokens == plain
        reached |= {staleness} if max(lags) == staleness else set()
        if max(lags) > staleness or groups != each or tokens != plain:
            print(f"schedule {number}: {staleness} {algorithm} {tables} {pools}", file=sys.stderr)
        if number % 10 == 9:
            print(f"up to schedule {number}: {same} have the tokens", file=sys.stderr, flush=True)
    met = emit("schedules within their bound", bound, f"of {count}", bar=count)
    met &= emit("schedules that train each drawn row once", once, f"of {count}", bar=count)
    met &= emit("schedules with the tokens of max_staleness 0", same, f"of {count}", bar=count)
    return met & emit("bounds that some token reached", len(reached), "of 4", bar=4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=12)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=("steps", "limit", "schedules"))
    asked = parser.parse_args()
    register_engine("sleeping", "in_flight:SleepingEngine")
    parts = {
        "steps": steps,
        "limit": limit,
        "schedules": lambda: schedules(asked.schedules, asked.first),
    }
    met = [part() for name, part in parts.items() if asked.only in (None, name)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
