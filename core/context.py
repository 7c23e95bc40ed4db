"""What an algorithm's step works with: data, roles by name, numerical work on a worker, mini-batches, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics

if TYPE_CHECKING:
    from hybridflow.core.rollouts.separate import SeparateRollout


class RoleHandle:
    """A role, as a step sees it: its verbs. Each returns at once; results are references."""

    def __init__(
        self,
        role: Role,
        group: WorkerGroup,
        owner: StepContext,
        rollout: SeparateRollout | None = None,
    ):
        self.role, self.group, self._ctx = role, group, owner
        self.rollout: Any = rollout or group
        """What generates: the group itself, or engines in a pool of their own."""

    def generate(
        self, prompts: Batch, *, greedy: bool = False, sampling: SamplingParams | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:  # fmt: skip
        """The prompts with response_ids, rollout_logprobs, loss_mask, weight_version, finish_reason, sample_id; with an
        environment also turn, episode_return, turn_rewards and turn_states.

        Syncs the engine first if the weights are newer. greedy: the most likely token each time (ReMax's baseline).
        """
        params = sampling or self._ctx.sampling
        if greedy:
            params = attrs.evolve(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        first = self._ctx.counters["samples"]
        self._ctx.counters["samples"] += prompts.rows
        numbered = prompts.with_columns(
            sample_id=torch.arange(first, first + prompts.rows, dtype=torch.int32)
        )
        verb = self.rollout.episodes if self._ctx.has_environment else self.rollout.generate
        made = verb(numbered, params, self._ctx.seed, max_tokens)
        return numbered.join(self._ctx.watch(self.role.name, made))

    def logprobs(self, batch: Batch, *, entropy: bool = False, topk: int = 0) -> Batch:
        """Column `role.column` (old_logprobs, ref_logprobs, ...), float32 per response token; entropy, topk_* on demand."""
        columns = {"logprobs": self.role.column} | ({"entropy": "entropy"} if entropy else {})
        return self._ctx.watch(self.role.name, self.group.logprobs(batch, columns, topk))

    def values(self, batch: Batch) -> Batch:
        """Column `role.column` (values, cost_values): V of the state before each response token."""
        return self._ctx.watch(self.role.name, self.group.values(batch, self.role.column))

    def score(self, batch: Batch) -> Batch:
        """Column `role.column` (scores, costs), float32 per row."""
        return self._ctx.watch(self.role.name, self.group.score(batch, self.role.column))

    def update(self, pairs: Sequence[tuple[Batch, Loss]] | tuple[Batch, Loss]) -> Future:
        """One optimizer step over one or more (mini-batch, loss) pairs. The result is Metrics."""
        pairs = [pairs] if isinstance(pairs, tuple) else list(pairs)
        pairs = [(self._ctx.whole_units(batch, loss), loss) for batch, loss in pairs]
        return self._ctx.watch(self.role.name, self.group.update(pairs))

    def loss(self, batch: Batch, loss: Loss) -> Future:
        """The loss without an update. The result is Metrics."""
        return self.group.loss((self._ctx.whole_units(batch, loss), loss))

    def sync(self) -> Future:
        """Bring the trained weights to the rollout engine now (generate does it when it must)."""
        return self._ctx.watch(self.role.name, self.rollout.sync())


class StepContext:
    """`ctx` of Algorithm.step. Roles are attributes: ctx.actor, ctx.critic, ctx.ref, ctx.reward, ..."""

    def __init__(
        self, groups: Mapping[str, tuple[Role, WorkerGroup]], tasks: WorkerGroup, sampling: SamplingParams, seed: int,
        rollouts: Mapping[str, SeparateRollout] | None = None, has_environment: bool = False,
    ):  # fmt: skip
        self.tasks, self.sampling, self.seed, self.has_environment = (
            tasks,
            sampling,
            seed,
            has_environment,
        )
        self.roles = {
            name: RoleHandle(role, group, self, (rollouts or {}).get(name))
            for name, (role, group) in groups.items()
        }
        self.counters = {"samples": 0, "shuffles": 0}
        """In every checkpoint: what makes later draws differ from earlier ones."""
        self.step = 0
        """Number of the current step, from 1."""
        self._results: list[tuple[str, Batch | Future]] = []
        self._logged = Metrics()
        self._aside = False

    def __getattr__(self, name: str) -> RoleHandle:
        roles = self.__dict__.get("roles", {})
        if name in roles:
            return roles[name]
        raise AttributeError(
            f"this run has no role {name!r} (roles: {', '.join(roles)}); declare it in the algorithm's roles()"
        )

    def prompts(self, count: int, data: str = "train") -> Batch:
        """The next `count` rows of the data, or of another of the algorithm's `data_sets`.

        prompt_ids, group (a number per drawn row), meta; with response templates also response_ids and loss_mask; with
        data.rejected two rows each, and pair and preferred. Call it again to draw more (DAPO).
        """
        return self.tasks.draw(data, count)

    def compute(self, function: Callable[..., dict[str, Any]], batch: Batch) -> Batch:
        """Numerical work on the whole batch, as one task on one worker that pulls only the columns it names.

        `function`'s parameters are column names: per-token columns arrive padded [B, T, ...] (0 on the right), per-row
        ones [B, ...], objects as lists; a parameter with a default may be missing. It returns a dict: [B, T, ...]
        tensors become per-token columns, [B] tensors per-row ones, numbers become metrics.
        """
        return self.watch("", self.tasks.compute(batch, function))

    def minibatches(
        self, batch: Batch, size: int, epochs: int = 1, unit: int = 1
    ) -> Iterator[Batch]:
        """Every row once per epoch, in a new random order, `size` rows at a time (the last may be smaller).

        Runs of `unit` neighbouring rows stay together. A batch that is one mini-batch keeps its order.
        """
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
            self.counters["shuffles"] += 1
            generator = np.random.default_rng([self.seed, self.counters["shuffles"]])
            starts = generator.permutation(batch.rows // unit) * unit
            order = (starts[:, None] + np.arange(unit)).reshape(-1)
            for start in range(0, len(order), size):
                yield batch.take(order[start : start + size])

    def whole_units(self, batch: Batch, loss: Loss) -> Batch:
        """The batch in an order, and with marks, such that splitting it cuts no unit of the loss."""
        if loss.unit == "row":
            return batch
        units = np.asarray(torch.as_tensor(batch[loss.unit].values))
        return batch.whole(units)

    def log(self, **values: float) -> None:
        """Report figures of this step."""
        self._logged = Metrics.merge([self._logged, Metrics.of(**values)])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is called within is left out of the step's metrics (a baseline's responses and scores)."""
        outside = self._aside
        self._aside = True
        try:
            yield
        finally:
            self._aside = outside

    def watch(self, role: str, result: Any) -> Any:
        if not self._aside:
            self._results.append((role, result))
        return result

    def finish(self) -> Metrics:
        """Wait for every call of the step; its metrics, named role/metric. Raises the first failure."""
        found = [self._logged]
        for role, result in self._results:
            metrics = result.result() if isinstance(result, Future) else result.metrics
            if not isinstance(metrics, Metrics):  # of sync: waited for, nothing to report
                continue
            found.append(metrics.prefixed(f"{role}/") if role else metrics)
        self._results, self._logged = [], Metrics()
        return Metrics.merge(found)
