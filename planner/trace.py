"""What an algorithm's step asks of its models, found by taking one step with made-up results: nothing is declared twice, and
an algorithm that the planner has never seen is planned for as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.core.context import StepContext
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.planner import NotPlanned
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.tasks import run_on_columns
from hybridflow.planner.workload import Task

TOKENS = 2
"""Of a made-up prompt and response: columns are real, and small."""


class TraceError(NotPlanned):
    """The step could not be taken with made-up results; says what it raised."""


def trace_step(algorithm: Algorithm, seed: int = 0) -> tuple[Task, ...]:
    """The tasks of one step, in the order of its first calls. Raises TraceError.

    Scores are 0 or 1 at random, as rewards often are: a step that draws until its groups differ (DAPO) draws as it would.
    """
    recorder = _Recorder(seed)
    groups: dict[str, tuple[Role, Any]] = {
        r.name: (r, _Model(r, recorder)) for r in algorithm.roles()
    }
    ctx = StepContext(groups, _Tasks(recorder, algorithm), SamplingParams(), seed, {}, False)  # type: ignore[arg-type]
    ctx.step = 1
    try:
        algorithm.step(ctx)
    except Exception as error:
        raise TraceError(
            f"{type(algorithm).__name__}.step could not be followed with made-up results: {type(error).__name__}: {error}"
        ) from error
    return recorder.tasks()


class _Recorder:
    def __init__(self, seed: int):
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.generator = np.random.default_rng(seed)

    def add(self, role: str, verb: str, rows: int) -> None:
        self.calls[role, verb, rows] += 1

    def tasks(self) -> tuple[Task, ...]:
        return tuple(
            Task(role, verb, rows, times)
            for (role, verb, rows), times in self.calls.items()
            if rows
        )  # type: ignore[arg-type]

    def per_token(self, rows: int, trailing: tuple[int, ...] = ()) -> Column:
        values = self.generator.uniform(-2.0, -0.1, (rows * TOKENS, *trailing)).astype(np.float32)
        return Column(torch.from_numpy(values), np.full(rows, TOKENS))

    def ids(self, rows: int) -> Column:
        return tokens(
            [torch.from_numpy(self.generator.integers(0, 9, TOKENS)) for _ in range(rows)],
            torch.int64,
        )

    def answered(self, rows: int) -> dict[str, Any]:
        ones = Column(torch.ones(rows * TOKENS, dtype=torch.uint8), np.full(rows, TOKENS))
        return {"response_ids": self.ids(rows), "loss_mask": ones}


class _Model:
    """In place of a role's workers: counts, and makes up the results."""

    def __init__(self, role: Role, recorder: _Recorder):
        self.role, self.recorder = role, recorder

    def generate(self, prompts: Batch, *_: Any) -> Batch:
        rows, made = prompts.rows, self.recorder
        made.add(self.role.name, "generate", rows)
        states = [["state"] for _ in range(rows)]
        turns = Column(torch.zeros(rows * TOKENS, dtype=torch.int32), np.full(rows, TOKENS))
        return Batch(
            {
                **made.answered(rows),
                "rollout_logprobs": made.per_token(rows),
                "weight_version": Column(
                    torch.ones(rows * TOKENS, dtype=torch.int32), np.full(rows, TOKENS)
                ),
                "finish_reason": ["stop"] * rows,
                "turn": turns,
                "episode_return": self._scores(rows),
                "turn_rewards": [[0.0] for _ in range(rows)],
                "turn_states": states,
            }
        )

    episodes = generate

    def logprobs(self, batch: Batch, columns: Mapping[str, str], topk: int = 0) -> Batch:
        self.recorder.add(self.role.name, "infer", batch.rows)
        made: dict[str, Any] = {
            name: self.recorder.per_token(batch.rows) for name in columns.values()
        }
        if topk:
            made["topk_logprobs"] = self.recorder.per_token(batch.rows, (topk,))
            made["topk_ids"] = Column(
                torch.zeros((batch.rows * TOKENS, topk), dtype=torch.int64),
                np.full(batch.rows, TOKENS),
            )
        return Batch(made)

    def values(self, batch: Batch, column: str) -> Batch:
        self.recorder.add(self.role.name, "infer", batch.rows)
        return Batch({column: self.recorder.per_token(batch.rows)})

    def score(self, batch: Batch, column: str) -> Batch:
        self.recorder.add(self.role.name, "infer", batch.rows)
        return Batch({column: self._scores(batch.rows)})

    def _scores(self, rows: int) -> torch.Tensor:
        return torch.from_numpy(self.recorder.generator.integers(0, 2, rows).astype(np.float32))

    def update(self, pairs: Sequence[tuple[Batch, Any]]) -> Future:
        self.recorder.add(self.role.name, "train", sum(batch.rows for batch, _ in pairs))
        return Future(Metrics)

    def loss(self, pair: tuple[Batch, Any]) -> Future:
        self.recorder.add(self.role.name, "infer", pair[0].rows)
        return Future(Metrics)

    def sync(self, *_: Any) -> Future:
        return Future(Metrics)


class _Tasks:
    """In place of the worker that draws and computes; it does compute."""

    def __init__(self, recorder: _Recorder, algorithm: Algorithm):
        self.recorder, self.drawn = recorder, 0
        sets = {"train": algorithm.data_columns, **algorithm.data_sets}
        self.columns: dict[str, tuple[str, ...]] = {
            name: tuple(columns) for name, columns in sets.items()
        }

    def draw(self, name: str, count: int) -> Batch:
        wanted = self.columns.get(name, ())
        numbers = np.arange(self.drawn, self.drawn + count)
        self.drawn += count
        pairs = "preferred" in wanted
        groups = torch.from_numpy(np.repeat(numbers, 2 if pairs else 1))
        rows = len(groups)
        columns: dict[str, Any] = {
            "prompt_ids": self.recorder.ids(rows),
            "group": groups,
            "meta": [{}] * rows,
        }
        if wanted:
            columns |= self.recorder.answered(rows)
        if pairs:
            columns |= {"pair": groups, "preferred": torch.arange(rows, dtype=torch.uint8) % 2 == 0}
        if "unsafe" in wanted:
            columns["unsafe"] = torch.arange(rows) % 2
        return Batch(columns)

    def compute(self, batch: Batch, function: Callable[..., Any]) -> Batch:
        return run_on_columns(batch, function)
