"""The work of an algorithm's step, found by taking one step with made-up results.

Stand-ins for the models count each call and return random columns of the right shape. So an
algorithm declares nothing twice, and one that the planner has never seen is planned for as well.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch

from hybridflow.core.context import GroupStepContext
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.planner import NotPlanned
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future
from hybridflow.core.values.batch import Batch, PromisedTable, View
from hybridflow.core.values.branches import BRANCHES
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.outcomes import COMPLETE
from hybridflow.core.workers.generation import EPISODE_READS
from hybridflow.core.workers.gradients import BASE
from hybridflow.core.workers.tasks import run_on_columns
from hybridflow.planner.workload import Task

TOKENS = 2
"""Length of each made-up prompt and response: the columns are real tensors, but small."""


MOST_CALLS = 10_000
"""Most calls of one step; a step with more may loop until results change, which they never do."""


class TraceError(NotPlanned):
    """The step could not be taken with made-up results; the message has the step's error."""


def trace_step(algorithm: Algorithm, seed: int = 0) -> tuple[Task, ...]:
    """Return the tasks of one step, in the order of their first calls. Raises TraceError.

    Scores are 0 or 1 at random. So a step that draws prompts until the scores of enough groups
    differ (DAPO) ends after a plausible number of draws.
    """
    recorder = _Recorder(seed)
    _follow(algorithm, recorder, seed)
    return recorder.tasks()


def read_early(algorithm: Algorithm, trained: Collection[str]) -> tuple[str, ...]:
    """Return the calls whose results the page itself reads in its own turn, as `ctx` names them.

    trained: the roles in pools in which something is trained; "compute" and "data" are roles here.
    Their calls wait for the step's turn (core/groups/outbox.py), and so does a page that reads
    their results: nothing is generated ahead meanwhile. Raises TraceError.
    """
    recorder = _Recorder(seed=0, trained=trained)
    _follow(algorithm, recorder, seed=0)
    return tuple(dict.fromkeys(recorder.read))


def _follow(algorithm: Algorithm, recorder: _Recorder, seed: int) -> None:
    # The algorithm meets stand-ins where a run has groups of workers.
    groups: dict[str, tuple[Role, Any]] = {}
    for role in algorithm.roles():
        groups[role.name] = (role, _Model(role, recorder))
    work: Any = _Tasks(recorder, algorithm)
    ctx = GroupStepContext(groups, work, work, SamplingParams(), seed, {}, False)
    ctx.step = 1

    # With real results the step may succeed, so that an error only means that the job is not
    # planned. Prints and breakpoints of the step are meant for the run.
    try:
        with redirect_stdout(io.StringIO()), _no_breakpoints():
            algorithm.step(ctx)
    except Exception as error:
        raise TraceError(
            f"{type(algorithm).__name__}.step could not be followed with made-up results: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _no_breakpoints() -> Iterator[None]:
    """Let `breakpoint()` do nothing."""
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *args, **kwargs: None
    try:
        yield
    finally:
        sys.breakpointhook = hook


class _Held(PromisedTable):
    """A result that waits for the step's turn, and notes that it is read."""

    def __init__(self, batch: Batch, known_names: tuple[str, ...] | None, note: Callable[[], None]):
        super().__init__(lambda: batch, batch.rows, known_names)
        self._note = note

    def batch(self) -> Batch:
        self._note()
        return super().batch()


class _Recorder:
    """Counts calls, and makes up columns from one random generator."""

    def __init__(self, seed: int, trained: Collection[str] = ()):
        self.calls: Counter[tuple[str, str, int]] = Counter()
        """Calls by role, verb and number of sequences."""
        self.prompts: Counter[tuple[str, str, int]] = Counter()
        """Distinct prompts by role, verb and number of sequences, summed over these calls."""
        self.generator = np.random.default_rng(seed)
        self.trained = trained
        """The roles whose results wait for the step's turn."""
        self.read: list[str] = []
        """The calls whose results the page has read before that."""
        self._working = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let the body read results as the workers do."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    def result(
        self, role: str, call: str, columns: Batch, inputs: Batch, names_known: bool = True
    ) -> Batch:
        """Return the columns as the result of a call, which may wait for the step's turn.

        inputs: with the columns that the call needs.
        """
        tables = [table for view in inputs.views for table in view.tables]
        if role not in self.trained and not any(isinstance(table, _Held) for table in tables):
            return columns

        def note() -> None:
            if not self._working:
                self.read.append(call)

        names = tuple(columns) if names_known else None
        return Batch.of_views([View((_Held(columns, names, note),))])

    def add(self, role: str, verb: str, *batches: Batch) -> None:
        """Count one call over the rows of `batches`. Rows of a group have one prompt."""
        with self.working():
            self._add(role, verb, *batches)

    def _add(self, role: str, verb: str, *batches: Batch) -> None:
        groups = [np.asarray(batch["group"].values) for batch in batches if "group" in batch]
        rows = sum(batch.rows for batch in batches)
        grouped = sum(map(len, groups))
        prompts = rows - grouped + (len(np.unique(np.concatenate(groups))) if groups else 0)
        self.calls[role, verb, rows] += 1
        self.prompts[role, verb, rows] += prompts
        if self.calls.total() > MOST_CALLS:
            raise NotPlanned(f"it made {MOST_CALLS:,} calls, and no end was in sight")

    def tasks(self) -> tuple[Task, ...]:
        """Return the calls as tasks, without those over no sequences."""
        found = []
        for (role, verb, rows), times in self.calls.items():
            prompts = round(self.prompts[role, verb, rows] / times)
            if rows:
                shared = prompts if prompts < rows else None
                found.append(Task(role, verb, rows, times, prompts=shared))
        return tuple(found)

    def per_token(self, rows: int, trailing: tuple[int, ...] = ()) -> Column:
        """Return a float32 column [tokens, *trailing] of negative numbers, as log-probabilities
        are.
        """
        numbers = self.generator.uniform(-2.0, -0.1, (rows * TOKENS, *trailing))
        values = torch.from_numpy(numbers.astype(np.float32))
        return Column(values, np.full(rows, TOKENS))

    def integers(self, rows: int, value: int, dtype: torch.dtype) -> Column:
        """Return a column [tokens] that is `value` everywhere."""
        values = torch.full((rows * TOKENS,), value, dtype=dtype)
        return Column(values, np.full(rows, TOKENS))

    def ids(self, rows: int) -> Column:
        """Return an int64 column of random token ids."""
        texts = [self.generator.integers(0, 9, TOKENS) for _ in range(rows)]
        return tokens([torch.from_numpy(text) for text in texts], torch.int64)

    def answered(self, rows: int) -> dict[str, Any]:
        """Return the columns of responses."""
        ones = self.integers(rows, 1, torch.uint8)
        return {"response_ids": self.ids(rows), "loss_mask": ones}


class _Model:
    """A stand-in for a role's workers, which counts calls and makes up the results."""

    def __init__(self, role: Role, recorder: _Recorder):
        self.role = role
        self.recorder = recorder

    def generate(self, prompts: Batch, *_: Any) -> Batch:
        rows = prompts.rows
        recorder = self.recorder
        recorder.add(self.role.name, "generate", prompts)

        # The columns of an engine and an environment, with responses of one turn.
        columns = {
            **recorder.answered(rows),
            "rollout_logprobs": recorder.per_token(rows),
            "weight_version": recorder.integers(rows, 1, torch.int32),
            "finish_reason": ["stop"] * rows,
            "outcome": [COMPLETE] * rows,
            "turn": recorder.integers(rows, 0, torch.int32),
            "episode_return": self._scores(rows),
            "turn_rewards": [[0.0] for _ in range(rows)],
            "turn_states": [["state"] for _ in range(rows)],
            BRANCHES: [[] for _ in range(rows)],
        }
        # Engines generate ahead, in a pool of their own.
        return recorder.result("", "generate", Batch(columns), prompts.select(EPISODE_READS))

    episodes = generate

    def logprobs(self, batch: Batch, columns: Mapping[str, str], topk: int = 0) -> Batch:
        rows = batch.rows
        self.recorder.add(self.role.name, "infer", batch)
        results: dict[str, Any] = {}
        for name in columns.values():
            results[name] = self.recorder.per_token(rows)

        # The k likeliest tokens at each position.
        if topk:
            ids = torch.zeros((rows * TOKENS, topk), dtype=torch.int64)
            results["topk_logprobs"] = self.recorder.per_token(rows, (topk,))
            results["topk_ids"] = Column(ids, np.full(rows, TOKENS))
        return self._result("logprobs", results, batch)

    def values(self, batch: Batch, column: str) -> Batch:
        self.recorder.add(self.role.name, "infer", batch)
        return self._result("values", {column: self.recorder.per_token(batch.rows)}, batch)

    def score(self, batch: Batch, column: str) -> Batch:
        self.recorder.add(self.role.name, "infer", batch)
        return self._result("score", {column: self._scores(batch.rows)}, batch)

    def _result(self, verb: str, columns: Mapping[str, Any], batch: Batch) -> Batch:
        name = self.role.name
        return self.recorder.result(name, f"{name}.{verb}", Batch(columns), batch.select(BASE))

    def _scores(self, rows: int) -> torch.Tensor:
        """Return random rewards, 0 or 1, float32 [rows]."""
        scores = self.recorder.generator.integers(0, 2, rows)
        return torch.from_numpy(scores.astype(np.float32))

    def update(self, pairs: Sequence[tuple[Batch, Any]]) -> Future:
        self.recorder.add(self.role.name, "train", *(batch for batch, _ in pairs))
        return Future(Metrics)

    def loss(self, pair: tuple[Batch, Any]) -> Future:
        self.recorder.add(self.role.name, "infer", pair[0])
        return Future(Metrics)

    def sync(self, *_: Any) -> Future:
        return Future(Metrics)


class _Tasks:
    """A stand-in for the worker that draws data, which it makes up, and computes on columns."""

    def __init__(self, recorder: _Recorder, algorithm: Algorithm):
        self.recorder = recorder
        self.drawn = 0
        sets = {"train": algorithm.data_columns, **algorithm.data_sets}
        self.columns: dict[str, tuple[str, ...]] = {
            name: tuple(columns) for name, columns in sets.items()
        }
        """Columns that each data set gives beside prompts, by its name."""

    def draw(self, name: str, count: int) -> Batch:
        wanted = self.columns.get(name, ())
        numbers = np.arange(self.drawn, self.drawn + count)
        self.drawn += count

        # In a data set of pairs, each number stands for two rows: a preferred response and another.
        pairs = "preferred" in wanted
        groups = torch.from_numpy(np.repeat(numbers, 2 if pairs else 1))
        rows = len(groups)
        columns: dict[str, Any] = {
            "prompt_ids": self.recorder.ids(rows),
            "group": groups,
            "meta": [{}] * rows,
        }

        # Sets with more than prompts have responses, which the other columns are about.
        if wanted:
            columns |= self.recorder.answered(rows)
        if pairs:
            columns |= {"pair": groups, "preferred": torch.arange(rows, dtype=torch.uint8) % 2 == 0}
        if "unsafe" in wanted:
            columns["unsafe"] = torch.arange(rows) % 2
        return Batch(columns)

    def encode(self, texts: Sequence[Any]) -> Batch:
        columns = {
            "prompt_ids": self.recorder.ids(len(texts)),
            "group": -1 - torch.arange(len(texts)),
            "meta": [{} for _ in texts],
        }
        return Batch(columns)

    def decode(self, batch: Batch, column: str) -> Future:
        """Return texts without a letter."""
        read = self.recorder.result("", "decode", batch.select([column]), batch)
        return Future(lambda: [""] * read[column].rows)

    def compute(self, batch: Batch, function: Callable[..., Any]) -> Batch:
        with self.recorder.working():
            columns = run_on_columns(batch, function)
        return self.recorder.result("compute", "compute", columns, batch, names_known=False)
