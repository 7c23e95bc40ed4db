"""Steps that are generated ahead (run.max_staleness = 1), beside the same steps one after the other.

python bench/ahead.py                    all parts; about ten minutes
python bench/ahead.py --schedules 300    so many random schedules, in place of 60

On two cores real work of engine and trainer does not fit side by side, so that three parts sleep in its place: they show the
order of the calls, under the real controller, on Ray.

balanced     a tool and a loss that sleep half a second each; and processor seconds of the controller per step
tails        an engine whose responses take as long as they have tokens, of lengths drawn from a lognormal distribution, sigma 1
schedules    drawn algorithms, settings and placements, with naps of random length in rewards and losses: each has the bits of
             the inline runtime, none hangs, and some step was generated while another was trained
two cores    real work: told

One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import attrs
import numpy as np
import torch
from common import emit, register_engine

from hybridflow.algorithms.dapo import DAPO
from hybridflow.algorithms.grpo import GRPO
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.algorithms.ppo import PPO
from hybridflow.algorithms.remax import ReMax
from hybridflow.algorithms.rloo import RLOO
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.kit.testing.runs import MODEL, TinyRun, even_tokens

BALANCED, TAILS, CONTROLLER, HANGS_S = 1.6, 1.3, 0.02, 60
"""Bars: times faster; share of a step of a second; seconds of a schedule."""
TOOL_S = LOSS_S = 0.5
TOKEN_S, MEAN, LONGEST, TRAIN_S = 0.004, 60, 400, 0.8
"""Of `tails`: seconds per token, mean and largest number of tokens, seconds of the loss."""
MOST_NAP_S = 0.15
napping = True
"""Whether rewards and losses of schedules sleep: on Ray, not in this process."""


# --- what sleeps ---


class Sleeps(PolicyLoss):
    """A loss whose first micro-batch takes `seconds` longer."""

    seconds = LOSS_S

    def __call__(self, batch, outputs):
        if not self.__dict__.get("slept"):
            self.slept = True
            time.sleep(self.seconds)
        return super().__call__(batch, outputs)


class Balanced(GRPO):
    loss = Sleeps


def lengths_of(step: int, rows: int) -> np.ndarray:
    """Tokens of each response of a step."""
    drawn = np.random.default_rng(step).lognormal(np.log(MEAN) - 0.5, 1.0, rows)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


class SleepsLonger(Sleeps):
    seconds = TRAIN_S


class Tailed(GRPO):
    """Its responses have lengths of their own."""

    loss = SleepsLonger
    reads_scores = False
    """Whether a step reads its scores before it goes on, as dynamic sampling does."""

    def step(self, ctx):
        lengths = torch.from_numpy(lengths_of(ctx.step, self.rows_per_step))
        prompts = ctx.prompts(self.config.prompts_per_step).repeat(self.config.group_size)
        sampling = attrs.evolve(ctx.sampling, ignore_stop=True)
        batch = ctx.actor.generate(prompts.with_columns(max_tokens=lengths), sampling=sampling)
        batch = batch.join(ctx.reward.score(batch))
        if self.reads_scores:
            _ = batch["scores"].values
        advantages = ctx.compute(self.advantages, batch)
        ctx.actor.update((batch.join(advantages), self.losses()["actor"]))


class TailedEngine(TransformersEngine):
    """Gives a response out when its tokens would have been made."""

    def __init__(self, model, config, context):
        super().__init__(model, config or TransformersEngineConfig(), context)
        self.entered: dict[int, float] = {}

    def enter(self, request):
        self.entered[request.id] = time.perf_counter()
        super().enter(request)

    def advance(self):
        for done in sorted(super().advance(), key=lambda one: len(one.response_ids)):
            due = self.entered.pop(done.id) + TOKEN_S * len(done.response_ids)
            time.sleep(max(due - time.perf_counter(), 0.0))
            yield done


class Tool(Environment):
    def step(self, turn):
        time.sleep(TOOL_S)
        return Answer(reward=float((turn.ids % 2 == 0).mean()), done=True)


def nap() -> None:
    if napping:
        time.sleep(random.SystemRandom().uniform(0.0, MOST_NAP_S))


def score(sample) -> float:
    if sample.response_ids.sum() % 16 == 0:
        nap()
    return even_tokens(sample)


class Naps(PolicyLoss):
    def __call__(self, batch, outputs):
        nap()
        return super().__call__(batch, outputs)


class NapsGRPO(GRPO):
    loss = Naps


class NapsDAPO(DAPO):
    loss = Naps


class NapsRLOO(RLOO):
    loss = Naps


class NapsReMax(ReMax):
    loss = Naps


class NapsPPO(PPO):
    loss = Naps


# --- runs ---

APART = {"pools": {"main": [1], "engines": [1]}, "actor": {"generation": {"pool": "engines"}}}
RAY = {"runtime": {"name": "ray", "threads": 1, "object_store_gb": 0.2}}
SIZES = {"prompts_per_step": 8, "group_size": 4, "correction": "truncate"}


def job(algorithm: dict[str, Any], staleness: int, **tables: Any) -> TinyRun:
    from hybridflow.settle.stages import overlay

    run = {"max_staleness": staleness, "samples": 0}
    made = overlay(APART, {"run": run, **tables})
    return TinyRun({**SIZES, **algorithm}, made)


def seconds_of(
    algorithm: dict[str, Any], staleness: int, steps: int, **tables: Any
) -> tuple[float, float]:
    """(seconds, processor seconds of this process) of a step, after one to warm up."""
    with job(algorithm, staleness, **RAY, **tables) as run:
        run.steps(1)
        began, used = time.perf_counter(), time.process_time()
        metrics = run.steps(steps)
        took, used = time.perf_counter() - began, time.process_time() - used
    lags = [values.get("actor/staleness", 0.0) for values in metrics]
    assert lags == [0.0] + [float(staleness)] * (steps - 1), lags
    return took / steps, used / steps


def balanced() -> bool:
    tables = {"environment": {"name": "ahead:Tool"}, "reward": {"function": "environment"}}
    tables["actor"] = {"micro_batch_tokens": 8192}
    taken = {k: seconds_of({"name": "ahead:Balanced"}, k, 20, **tables) for k in (0, 1)}
    (now, _), (ahead, used) = taken[0], taken[1]
    met = emit(
        "balanced, a step", ahead, "s", ratio=now / ahead, against="max_staleness 0", bar=BALANCED
    )
    return met & emit("controller, share of a step of 1 s", used, "", bar=CONTROLLER, at_most=True)


def tails() -> bool:
    sampling = {"max_tokens": LONGEST}
    model = {"config": {**MODEL, "max_position_embeddings": 512}}
    tables = {
        "rollout": {"name": "tailed"},
        "sampling": sampling,
        "actor": {"model": model, "micro_batch_tokens": 20_000},
    }
    now, ahead = (seconds_of({"name": "ahead:Tailed"}, k, 12, **tables)[0] for k in (0, 1))
    return emit(
        "tails, a step", ahead, "s", ratio=now / ahead, against="max_staleness 0", bar=TAILS
    )


def overlapped(run: TinyRun) -> bool:
    """Whether engines have generated while a model was trained."""
    spans = run.session.timeline.take().spans
    times: dict[str, list[tuple[float, float]]] = {"generate": [], "update": []}
    for span in spans:
        if span.name in times:
            times[span.name].append((span.start, span.start + span.seconds))
    return any(
        begun < end and start < ended
        for start, end in times["generate"]
        for begun, ended in times["update"]
    )


def drawn(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An algorithm's table and others."""
    draws = random.Random(number)
    name = draws.choice(["GRPO", "DAPO", "RLOO", "ReMax", "PPO"])
    algorithm: dict[str, Any] = {"name": f"ahead:Naps{name}"}
    algorithm["group_size"] = 1 if name in ("ReMax", "PPO") else draws.choice([2, 4])
    algorithm["mini_batch_size"] = draws.choice([0, 4, 8])
    algorithm["correction"] = draws.choice(["truncate", "mask"])
    if draws.random() < 0.4:
        algorithm["kl_coef"] = 0.05
        if draws.random() < 0.5:
            algorithm |= {"kl_target": 0.05, "kl_horizon": 500.0}
    elif name in ("PPO", "ReMax"):
        algorithm["kl_coef"] = 0.0
    reward: dict[str, Any] = {"function": "ahead:score"}
    if draws.random() < 0.3:
        reward["pool"] = "main"
    return algorithm, {"reward": reward}


def schedules(count: int) -> bool:
    global napping
    napping = False

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    equal = overlaps = 0
    longest = 0.0
    for number in range(count):
        algorithm, tables = drawn(number)
        with job(algorithm, 1, runtime="inline", **tables) as run:
            run.steps(4)
            expected = run.checksums()
        with job(algorithm, 1, **RAY, **tables) as run:
            signal.alarm(HANGS_S)
            began = time.perf_counter()
            try:
                metrics = run.steps(4)
                same = run.checksums() == expected
            except TimeoutError:
                print(f"schedule {number} hangs: {algorithm} {tables}", file=sys.stderr)
                return emit("schedules, the longest", HANGS_S, "s", bar=HANGS_S - 1, at_most=True)
            finally:
                signal.alarm(0)
            longest = max(longest, time.perf_counter() - began)
            bound = all(values["actor/staleness_max"] <= 1 for values in metrics)
            if not (same and bound):
                print(f"schedule {number}: {algorithm} {tables}", file=sys.stderr)
            equal += same and bound
            overlaps += overlapped(run)
    met = emit("schedules equal to the inline runtime", equal, f"of {count}", bar=count)
    met &= emit("schedules in which steps overlapped", overlaps, f"of {count}", bar=1)
    return met & emit("schedules, the longest", longest, "s", bar=HANGS_S, at_most=True)


def two_cores() -> None:
    model = {
        "config": {
            **MODEL,
            "hidden_size": 128,
            "intermediate_size": 256,
            "max_position_embeddings": 128,
        }
    }
    tables = {"actor": {"model": model}, "sampling": {"max_tokens": 64}}
    sizes = {"name": "grpo", "prompts_per_step": 16, "mini_batch_size": 16, "epochs": 2}
    now, ahead = (seconds_of(sizes, k, 10, **tables)[0] for k in (0, 1))
    emit("real work on two cores, a step", ahead, "s", ratio=now / ahead, against="max_staleness 0")


def main() -> int:
    from hybridflow.backends.ray.config import RayConfig
    from hybridflow.backends.ray.runtime import RayRuntime

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=60)
    asked = parser.parse_args()

    register_engine("tailed", "ahead:TailedEngine")

    # One Ray for all runs.
    runtime = RayRuntime(RayConfig(object_store_gb=0.2))
    runtime.start()
    try:
        met = balanced()
        met &= tails()
        two_cores()
        met &= schedules(asked.schedules)
    finally:
        runtime.shutdown()
    return 0 if met else 1


if __name__ == "__main__":
    import ahead  # this file, as a module that workers import too

    sys.exit(ahead.main())
