"""The context of an algorithm's step: data, roles, numerical work, mini-batches and metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol as Typing

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future, WorkerGroup, is_held
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.gradients import LAG


@attrs.define(eq=False)
class GroupRoleHandle:
    """The verbs of a role (hybridflow.core.contracts.step.RoleHandle), as calls of its group.

    Three things block: a sync to engines in a pool of their own, the number of rows of fresh
    prompts, and the units of a loss, by which `update` and `loss` order their rows.
    """

    role: Role
    group: WorkerGroup
    _ctx: GroupStepContext
    rollout: WorkerGroup | SeparateRollout
    """The group that generates: `group` itself, or engines in a pool of their own."""

    def generate(
        self,
        prompts: Batch,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> Batch:
        params = sampling or self._ctx.sampling
        if greedy:
            params = attrs.evolve(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

        # Each response of a run has a number of its own, which seeds its random draws.
        first = self._ctx.counters["samples"]
        self._ctx.counters["samples"] += prompts.rows
        sample_ids = torch.arange(first, first + prompts.rows, dtype=torch.int32)
        numbered = prompts.with_columns(sample_id=sample_ids)

        if self._ctx.replay is None:
            added = self._generate(numbered, params)
        else:
            number = len(self._ctx.generated)
            replayed = self._ctx.replay(self._ctx.step, number, self.role.name, numbered)
            added = [self._watch(replayed)]
        self._ctx.generated.append(Generated(self.role.name, numbered, added))
        return numbered.join(*added)

    def _generate(self, numbered: Batch, params: SamplingParams) -> list[Batch]:
        """Return responses to these prompts, and by how many steps they lag where that is known."""
        responses = self._ctx.kept(numbered)
        replayed = responses is not None
        if responses is None:
            responses = self._respond(numbered, params)
        added = [self._watch(responses)]
        if isinstance(self.rollout, SeparateRollout) and not self._carries:
            ahead = self._ctx.sent(self.role, self.rollout, numbered, responses, replayed)
            if self.rollout.ahead:
                lag = torch.full((numbered.rows,), int(ahead), dtype=torch.int8)
                added.append(Batch({LAG: lag}))
        return added

    def _respond(self, prompts: Batch, params: SamplingParams) -> Batch:
        seed = self._ctx.seed
        if self._carries:
            # Opened at once, so that they are generated beside those of earlier steps.
            step = self._ctx.step
            if isinstance(self.rollout, SeparateRollout):
                self.rollout.open(prompts, params, seed, step)
                if not self.rollout.engines.outbox.holds:
                    self._ctx.complete(step)  # the step has its turn: it waits here
                return self._ctx.data.collect(prompts, self.role.name, step)
            self._watch(self.group.open(prompts, params, seed))
            return self.group.collect(prompts, step)
        verb = self.rollout.episodes if self._ctx.has_environment else self.rollout.generate
        return verb(prompts, params, seed)

    @property
    def _carries(self) -> bool:
        """Whether its responses may outlive a generation phase, or newer weights."""
        return self.role.name in self._ctx.carries

    def logprobs(self, batch: Batch, *, entropy: bool = False, topk: int = 0) -> Batch:
        columns = {"logprobs": self.role.column} | ({"entropy": "entropy"} if entropy else {})
        return self._watch(self.group.logprobs(batch, columns, topk))

    def values(self, batch: Batch) -> Batch:
        return self._watch(self.group.values(batch, self.role.column))

    def score(self, batch: Batch) -> Batch:
        scores = self._watch(self.group.score(batch, self.role.column))
        self._ctx.remember(Scoring(self.role, batch, scores))
        return scores

    def update(self, pairs: Sequence[tuple[Batch, Loss]] | tuple[Batch, Loss]) -> Future:
        (batch, loss), *others = [pairs] if isinstance(pairs, tuple) else pairs
        pairs = [(self._ctx.recorded(self.role, batch), loss), *others]
        # Rows that the loss compares with each other (a pair) must reach the same rank.
        pairs = [(self._ctx.whole_units(batch, loss), loss) for batch, loss in pairs]
        update = self.group.update(pairs)
        self._ctx.updates.append((self.role.name, update))
        return self._watch(update)

    def loss(self, batch: Batch, loss: Loss) -> Future:
        return self.group.loss((self._ctx.whole_units(batch, loss), loss))

    def sync(self) -> Future:
        if isinstance(self.rollout, SeparateRollout) and self.rollout.ahead:
            # Engines got the newest weights at the step's turn, which this waits for.
            self.group.version().result()
            return Future(lambda: None)
        return self._watch(self.rollout.sync())

    def _watch(self, result: Any) -> Any:
        return self._ctx.watch(self.role.name, result)


@attrs.frozen(eq=False)
class Scoring:
    """Rows that a reward has scored."""

    role: Role
    batch: Batch
    scores: Batch

    def equal_groups(self) -> Metrics:
        """Return <role>/equal_groups: the share of groups, of several scores, with equal ones.

        An advantage within such a group is 0 for all of its rows.
        """
        if "group" not in self.batch:
            return Metrics()
        groups = np.asarray(torch.as_tensor(self.batch["group"].values))
        values = np.asarray(torch.as_tensor(self.scores[self.role.column].values))
        if len(groups) == 0:
            return Metrics()

        # Rows of a group next to each other; first: where each group begins.
        order = np.argsort(groups, kind="stable")
        _, first = np.unique(groups[order], return_index=True)
        # A failed row has no score, NaN; fmin and fmax leave it out.
        least = np.fmin.reduceat(values[order], first)
        most = np.fmax.reduceat(values[order], first)
        several = np.add.reduceat(~np.isnan(values[order]), first, dtype=np.int64) > 1
        equal = int((least == most)[several].sum())
        return Metrics({f"{self.role.name}/equal_groups": (equal, int(several.sum()))})


@attrs.define(eq=False)
class Generation:
    """One call of `generate` by engines in a pool of their own."""

    role: str
    rollout: SeparateRollout
    prompts: Batch
    """The rows that it was given."""
    responses: Batch
    """The columns that it adds to them."""
    ahead: bool
    """Whether it was sent before the turn of its step."""
    version: int | None
    """The version of the engines' weights as they got the call; None while it is held."""

    @property
    def held(self) -> bool:
        """Whether it waits for the turn of its step."""
        return self.version is None


@attrs.frozen(eq=False)
class Generated:
    """One call of `generate`."""

    role: str
    prompts: Batch
    """The rows that it was given."""
    added: Sequence[Batch]
    """The columns that it has added, of the same rows."""


class Recorder(Typing):
    """Chooses rows of a step to be recorded."""

    def fresh(self) -> Recorder:
        """Return a recorder for another step."""

    def scored(self, batch: Batch, scores: Batch) -> None:
        """Take note of rows that a reward has scored."""

    def mark(self, role: Role, batch: Batch) -> Batch:
        """Return rows that a role trains on, with a column that says which are recorded."""

    def take(self, step: int, recorded: Mapping[str, Mapping[int, np.ndarray]]) -> list[SampleRow]:
        """Return the rows of the step, which has ended; recorded: `Metrics.recorded` of it."""


class GroupStepContext:
    """`ctx` of Algorithm.step (hybridflow.core.contracts.step.StepContext) in a run."""

    def __init__(
        self,
        groups: Mapping[str, tuple[Role, WorkerGroup]],
        tasks: WorkerGroup,
        data: WorkerGroup,
        sampling: SamplingParams,
        seed: int,
        rollouts: Mapping[str, SeparateRollout] | None = None,
        has_environment: bool = False,
    ):
        self.tasks = tasks
        self.data = data
        self.sampling = sampling
        self.seed = seed
        self.has_environment = has_environment
        self.roles = {
            name: GroupRoleHandle(role, group, self, (rollouts or {}).get(name, group))
            for name, (role, group) in groups.items()
        }
        self.counters = {"samples": 0, "shuffles": 0}
        """Numbers that make later random draws differ from earlier ones; part of checkpoints."""
        self.step = 0
        """Number of the current step, from 1."""
        self.recorder: Recorder | None = None
        """Chooses rows of the step to be recorded, if any are."""
        self.replay: Callable[[int, int, str, Batch], Batch] | None = None
        """Returns what another run has generated: by step, number of the call in it, role, prompts.
        None: engines generate."""
        self.carries: Collection[str] = ()
        """The roles whose responses may outlive a generation phase, or newer weights."""
        self.complete: Callable[[int], None] = lambda step: None
        """Waits until engines in pools of their own have generated all opened rows of a step."""
        self._aside = False
        self._clear()

    def _clear(self) -> None:
        """Forget the calls of the step."""
        self.generations: list[Generation] = []
        """What engines in pools of their own have generated, `aside` too."""
        self.generated: list[Generated] = []
        """Every call of `generate` of the step, `aside` too."""
        self.updates: list[tuple[str, Future]] = []
        """(role, its update) of the step, `aside` too."""
        self.replays: Sequence[Batch | None] = ()
        """For each `generate` of the step, what a checkpoint has of it (see Checkpoints)."""
        self._scored: list[Scoring] = []
        """The rows that rewards have scored since the last `finish`."""
        self._results: list[tuple[str, Batch | Future]] = []
        self._logged = Metrics()

    def page(self, step: int, carries: Collection[str] = ()) -> GroupStepContext:
        """Return a context for the calls of one step alone; the counters are shared.

        carries: the roles whose responses may outlive a generation phase, or newer weights.
        """
        page = copy.copy(self)
        page.step = step
        page.carries = carries
        page._clear()
        page.roles = {name: attrs.evolve(handle, ctx=page) for name, handle in self.roles.items()}
        if self.recorder is not None:
            page.recorder = self.recorder.fresh()
        return page

    def __getattr__(self, name: str) -> GroupRoleHandle:
        roles = self.__dict__.get("roles", {})
        if name in roles:
            return roles[name]

        raise AttributeError(
            f"this run has no role {name!r} (roles: {', '.join(roles)}); "
            "declare it in the algorithm's roles()"
        )

    def prompts(self, count: int, data: str = "train") -> Batch:
        return self.data.draw(data, count)

    def encode(self, texts: Sequence[str | Sequence[Mapping[str, Any]]]) -> Batch:
        return self.data.encode(list(texts))

    def decode(self, batch: Batch, column: str = "response_ids") -> list[str]:
        return self.data.decode(batch, column).result()

    def compute(self, function: Callable[..., dict[str, Any]], batch: Batch) -> Batch:
        return self.watch("", self.tasks.compute(batch, function))

    def minibatches(
        self, batch: Batch, size: int, epochs: int = 1, unit: int = 1
    ) -> Iterator[Batch]:
        if size % unit:
            raise ValueError(
                f"the mini-batch size {size} must be a multiple of the unit of {unit} rows"
            )

        for _ in range(epochs):
            if size >= batch.rows:
                yield batch
                continue
            if batch.rows % unit:
                raise ValueError(
                    f"a batch of {batch.rows} rows has a part of a unit of {unit} rows at its end"
                )

            # The order depends on the seed and the number of shuffles before, not on other draws.
            self.counters["shuffles"] += 1
            generator = np.random.default_rng([self.seed, self.counters["shuffles"]])
            starts = generator.permutation(batch.rows // unit) * unit
            order = (starts[:, None] + np.arange(unit)).reshape(-1)
            for start in range(0, len(order), size):
                yield batch.take(order[start : start + size])

    def whole_units(self, batch: Batch, loss: Loss) -> Batch:
        """Return the batch ordered and marked such that a split cuts no unit of the loss."""
        if loss.unit == "row":
            return batch
        units = np.asarray(torch.as_tensor(batch[loss.unit].values))
        return batch.whole(units)

    def log(self, **values: float) -> None:
        self._logged = Metrics.merge([self._logged, Metrics.of(**values)])

    @contextmanager
    def aside(self) -> Iterator[None]:
        outside = self._aside
        self._aside = True
        try:
            yield
        finally:
            self._aside = outside

    def watch(self, role: str, result: Any) -> Any:
        """Note a call's result, for which `finish` waits; return the result itself."""
        if not self._aside:
            self._results.append((role, result))
        return result

    def sent(
        self,
        role: Role,
        rollout: SeparateRollout,
        prompts: Batch,
        responses: Batch,
        replayed: bool,
    ) -> bool:
        """Note which weights engines in a pool of their own have as they get the call.

        Return whether they are behind those of the step's turn. replayed: the call was made before
        the checkpoint that the run goes on from.
        """
        held = is_held(responses)
        ahead = replayed or (rollout.engines.outbox.holds and not held)
        version = None if held else rollout.version
        generation = Generation(role.name, rollout, prompts, responses, ahead, version)
        self.generations.append(generation)
        return ahead

    def kept(self, prompts: Batch) -> Batch | None:
        """Return the responses of the step's next `generate` that a checkpoint has, if it does."""
        at = len(self.generations)
        kept = self.replays[at] if at < len(self.replays) else None
        return None if kept is None else self.data.matched(prompts, kept)

    def remember(self, scoring: Scoring) -> None:
        """Keep the rows that a reward has scored, for the metrics of groups and to record them."""
        if not self._aside:
            self._scored.append(scoring)
            if self.recorder is not None:
                self.recorder.scored(scoring.batch, scoring.scores)

    def recorded(self, role: Role, batch: Batch) -> Batch:
        """Return rows that a role trains on, those marked that are to be recorded."""
        if self._aside or self.recorder is None:
            return batch
        return self.recorder.mark(role, batch)

    def finish(self) -> Metrics:
        """Wait for every verb of the step and merge their metrics, named role/metric.

        Raises the error of the first call that failed. Calls within `aside` are not included.
        """
        parts = [self._logged]
        for role, result in self._results:
            metrics = result.result() if isinstance(result, Future) else result.metrics
            if not isinstance(metrics, Metrics):  # a sync, which reports nothing
                continue

            parts.append(metrics.prefixed(f"{role}/") if role else metrics)

        parts += [scoring.equal_groups() for scoring in self._scored]
        self._clear()
        return Metrics.merge(parts)
