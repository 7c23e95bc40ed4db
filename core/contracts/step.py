"""What a step works with: data, roles with their verbs, numerical work on a worker, mini-batches, metrics.

`hybridflow.core.context` has it for a run; a planner that follows a step without running it brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol as Typing

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.role import Role
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.values.batch import Batch

Pair = tuple[Batch, Loss]
"""A mini-batch and the loss that is taken on it."""


class Pending(Typing):
    """The result of a call that is no Batch."""

    def result(self) -> Any:
        """Wait for it. Raises the WorkerError of the first rank that failed."""


class RoleHandle(Typing):
    """A role, as a step sees it. Each verb returns at once; results are references."""

    role: Role

    def generate(
        self,
        prompts: Batch,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> Batch:
        """The prompts with response_ids, rollout_logprobs, loss_mask, weight_version, finish_reason, sample_id; with an
        environment also turn, episode_return, turn_rewards and turn_states.

        Syncs the engine first if the weights are newer. greedy: the most likely token each time (ReMax's baseline).
        max_tokens: a limit per `sample_id` modulo its length; by default sampling.max_tokens.
        """

    def logprobs(self, batch: Batch, *, entropy: bool = False, topk: int = 0) -> Batch:
        """Column `role.column` (old_logprobs, ref_logprobs, ...), float32 per response token; entropy, topk_* on demand."""

    def values(self, batch: Batch) -> Batch:
        """Column `role.column` (values, cost_values): V of the state before each response token."""

    def score(self, batch: Batch) -> Batch:
        """Column `role.column` (scores, costs), float32 per row."""

    def update(self, pairs: Sequence[Pair] | Pair) -> Pending:
        """One optimizer step over one or more (mini-batch, loss) pairs. The result is Metrics."""

    def loss(self, batch: Batch, loss: Loss) -> Pending:
        """The loss without an update. The result is Metrics."""

    def sync(self) -> Pending:
        """Bring the trained weights to the rollout engine now (generate does it when it must)."""


class StepContext(Typing):
    """`ctx` of Algorithm.step. Roles are attributes: ctx.actor, ctx.critic, ctx.ref, ctx.reward, ..."""

    @property
    def roles(self) -> Mapping[str, RoleHandle]:
        """By name."""

    sampling: SamplingParams
    """How responses are sampled in this run."""
    step: int
    """Number of the current step, from 1."""

    def __getattr__(self, name: str) -> RoleHandle:
        """A role. Raises AttributeError for one that the run does not have."""

    def prompts(self, count: int, data: str = "train") -> Batch:
        """The next `count` rows of the data, or of another of the algorithm's `data_sets`.

        prompt_ids, group (a number per drawn row), meta; with response templates also response_ids and loss_mask; with
        data.rejected two rows each, and pair and preferred. Call it again to draw more (DAPO).
        """

    def compute(self, function: Callable[..., dict[str, Any]], batch: Batch) -> Batch:
        """Numerical work on the whole batch, as one task on one worker that pulls only the columns it names.

        `function`'s parameters are column names: per-token columns arrive padded [B, T, ...] (0 on the right), per-row
        ones [B, ...], objects as lists; a parameter with a default may be missing. It returns a dict: [B, T, ...]
        tensors become per-token columns, [B] tensors per-row ones, numbers become metrics.
        """

    def minibatches(
        self, batch: Batch, size: int, epochs: int = 1, unit: int = 1
    ) -> Iterator[Batch]:
        """Every row once per epoch, in a new random order, `size` rows at a time (the last may be smaller).

        Runs of `unit` neighbouring rows stay together. A batch that is one mini-batch keeps its order.
        """

    def log(self, **values: float) -> None:
        """Report figures of this step."""

    def aside(self) -> AbstractContextManager[None]:
        """What is called within is left out of the step's metrics (a baseline's responses and scores)."""
