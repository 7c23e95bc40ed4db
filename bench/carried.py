"""Responses that outlive a generation phase (run.max_staleness, engines that take turns with the training), beside phases that
wait for their longest response.

python bench/carried.py                    all parts; about six minutes
python bench/carried.py --schedules 300    so many random schedules, in place of 40

simulated    an engine that makes a token per step for as many sequences as it has places for: the real controller, lengths
             drawn from a lognormal distribution, sigma 1; the figure is the engine's steps in a phase. Places for one step's
             sequences (the bars), for all that are open, and for half
embedded     the embedded engine with a tiny model on this CPU: seconds of a phase, told
schedules    drawn algorithms, settings, bounds and places: no token lags by more than the bound, and two runs are equal; with
             weights that do not move the tokens are those of a run without a bound; some token lags by each bound from 1 to 4

One JSON line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import ahead
import attrs
import numpy as np
import torch
from ahead import LONGEST
from common import emit, register_engine

from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.core.contracts.capabilities import EngineCapabilities
from hybridflow.core.contracts.rollout import EngineSettings
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.core.workers import model_worker
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.huggingface.models import policy_config, saved_parameters
from hybridflow.kit.testing.runs import MODEL, TinyRun

BARS = {1: 1.5, 2: 1.8}
"""run.max_staleness -> how many times fewer steps a phase has."""
SAME_LENGTH = 0.02
PROMPTS, GROUP = 16, 4
ROWS = PROMPTS * GROUP
FIRST, STEPS = 4, 24
"""Phases are counted from step FIRST on, and to where all later steps of a phase are still open."""


@attrs.frozen
class SimulatedConfig(EngineSettings):
    places: int = ROWS


class SimulatedEngine(ContinuousEngine):
    """A token per step for each sequence that has a place; its weights are stored, and not used."""

    Config = SimulatedConfig
    capabilities = EngineCapabilities()

    def start(self) -> None:
        self.max_positions, self.vocab = MODEL["max_position_embeddings"] * 100, MODEL["vocab_size"]
        shapes, self.ties = saved_parameters(policy_config(self.model))
        self.weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.made: dict[int, int] = {}
        self.steps = 0

    def layout(self) -> WeightLayout:
        params = {name: Param(tuple(held.shape), held.dtype) for name, held in self.weights.items()}
        boxes = {name: (Box.full(param.shape),) for name, param in params.items()}
        return WeightLayout(params, {0: boxes}, self.ties)

    def view(self, name: str, box: Box) -> torch.Tensor:
        return self.weights[name][box.slices()]

    def receive(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        self.view(name, box).copy_(tensor)

    def enter(self, request) -> None:
        self.made[request.id] = 0

    def advance(self):
        self.steps += 1
        done = []
        for request in list(self.running.values())[: self.config.places]:
            self.made[request.id] += 1
            if len(request.prefix()[0]) + self.made[request.id] == request.sampling.max_tokens:
                done.append(self.said(request, "length"))
        return done

    def leave(self, ids):
        return [self.said(self.running[number], "abort") for number in ids]

    def said(self, request, reason: str):
        count = self.made.pop(request.id)
        return self.completion(request, [5] * count, [-1.0] * count, reason)

    def figures(self) -> dict[str, float]:
        steps, self.steps = self.steps, 0
        return {"engine_steps": steps}


class Tailed(ahead.Tailed):
    """Responses with lengths of their own, the same ones whatever the engine; no part of the training sleeps."""

    loss = PolicyLoss


def metrics_of(staleness: int, steps: int, **tables: Any) -> list[dict[str, float]]:
    algorithm = {
        "name": "carried:Tailed",
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "correction": "truncate",
    }
    model = {"config": {**MODEL, "max_position_embeddings": 512}}
    run = {"max_staleness": staleness, "samples": 0, "mismatch_stop": float("inf")}
    shared = {"run": run, "actor": {"model": model, "micro_batch_tokens": 20_000}}
    with TinyRun(algorithm, {**shared, "sampling": {"max_tokens": LONGEST}, **tables}) as run:
        return run.steps(steps)


def simulated() -> bool:
    met = True
    for places, named in ((ROWS, "one step's"), (10**6, "all open"), (ROWS // 2, "half a step's")):
        taken: dict[int, float] = {}
        lengths: dict[int, float] = {}
        for staleness in (0, 1, 2, 4):
            rollout = {"name": "simulated", "places": places}
            found = metrics_of(staleness, STEPS, rollout=rollout)[FIRST : STEPS - 4]
            taken[staleness] = float(np.mean([one["actor/engine_steps"] for one in found]))
            lengths[staleness] = float(np.mean([one["actor/response_length"] for one in found]))
            assert all(one.get("actor/staleness_max", 0) <= staleness for one in found)
            name = f"steps of a phase, places for {named} sequences, max_staleness {staleness}"
            ratio = taken[0] / taken[staleness]
            bar = BARS.get(staleness) if places == ROWS else None
            met &= emit(name, taken[staleness], "", ratio=ratio, against="max_staleness 0", bar=bar)
            apart = abs(lengths[staleness] / lengths[0] - 1)
            met &= emit("mean trained length, apart by", apart, "", bar=SAME_LENGTH, at_most=True)
    return met


def embedded() -> None:
    taken: dict[int, float] = {}
    for staleness in (0, 1, 2):
        found = metrics_of(staleness, 14)[FIRST:12]
        taken[staleness] = float(np.mean([one["actor/generate_seconds"] for one in found]))
        emit(
            f"a phase of the embedded engine, max_staleness {staleness}",
            taken[staleness],
            "s",
            ratio=taken[0] / taken[staleness],
            against="max_staleness 0",
        )


def drawn(number: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """A bound, an algorithm's table and others."""
    draws = random.Random(number)
    name = draws.choice(["grpo", "dapo", "rloo", "remax", "ppo"])
    single = name in ("remax", "ppo")
    algorithm: dict[str, Any] = {
        "name": name,
        "prompts_per_step": 8 if single else draws.choice([4, 8]),
        "group_size": 1 if single else draws.choice([2, 4]),
        "mini_batch_size": draws.choice([0, 4, 8]),
        "correction": draws.choice(["truncate", "mask"]),
        "kl_coef": 0.0,
    }
    if draws.random() < 0.3:
        algorithm |= {"kl_coef": 0.05}
        if draws.random() < 0.5:
            algorithm |= {"kl_target": 0.05, "kl_horizon": 500.0}
    tables = {
        "sampling": {"max_tokens": draws.choice([8, 24])},
        "rollout": {"max_sequences": draws.choice([0, 6])},
    }
    return draws.randint(1, 4), algorithm, tables


def schedules(count: int) -> bool:
    made: dict[int, list[int]] = {}

    def noted(generates):
        def generate(engine, batch, *args, **options):
            generated = generates(engine, batch, *args, **options)
            samples = batch["sample_id"].values.tolist()
            responses = [row.tolist() for row in generated["response_ids"]]
            made.update(zip(samples, responses, strict=True))
            return generated

        return generate

    model_worker.collect_rows = noted(model_worker.collect_rows)
    model_worker.generate_rows = noted(model_worker.generate_rows)

    def taken(staleness: int, algorithm: dict[str, Any], tables: dict[str, Any], lr: float):
        """(metrics, checksums, tokens by sample) of six steps."""
        made.clear()
        run = {"max_staleness": staleness, "samples": 0}
        with TinyRun(algorithm, {"run": run, "actor": {"optimizer": {"lr": lr}}, **tables}) as run:
            return run.steps(6), run.checksums(), dict(made)

    bound = equal = same = 0
    reached = set()
    for number in range(count):
        staleness, algorithm, tables = drawn(number)
        (metrics, sums, tokens), again = (
            taken(staleness, algorithm, tables, 1e-3) for _ in range(2)
        )
        lags = [values["actor/staleness_max"] for values in metrics]
        bound += max(lags) <= staleness
        equal += (sums, tokens) == again[1:]
        reached |= {staleness} if max(lags) == staleness else set()
        still = [taken(most, algorithm, tables, 1e-30)[2] for most in (0, staleness)]
        same += still[0] == still[1]
        if not max(lags) <= staleness or (sums, tokens) != again[1:] or still[0] != still[1]:
            print(f"schedule {number}: {staleness} {algorithm} {tables}", file=sys.stderr)
    met = emit("schedules within their bound", bound, f"of {count}", bar=count)
    met &= emit("schedules with equal runs", equal, f"of {count}", bar=count)
    met &= emit("schedules with the tokens of max_staleness 0", same, f"of {count}", bar=count)
    return met & emit("bounds that some token reached", len(reached), "of 4", bar=4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=40)
    asked = parser.parse_args()
    register_engine("simulated", "carried:SimulatedEngine")
    met = simulated()
    embedded()
    met &= schedules(asked.schedules)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
