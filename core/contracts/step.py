"""The interface of an algorithm's step: prompts, roles with their verbs, numerical work, metrics.

`hybridflow.core.context` implements StepContext for a run. A planner that traces a step without
running it has an implementation of its own.
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
"""A mini-batch and the loss that is computed on it."""


class PendingResult(Typing):
    """The result of a call that returns no Batch."""

    def result(self) -> Any:
        """Wait for the result. Raises the WorkerError of the first rank that failed."""


class RoleHandle(Typing):
    """A role in a step. Each verb returns at once; its result is a reference."""

    role: Role

    # --- verbs that add columns to a batch ---

    def generate(
        self,
        prompts: Batch,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> Batch:
        """Generate responses; first sync the engine if the trained weights are newer than its own.

        Returns the prompts with response_ids, rollout_logprobs, loss_mask, weight_version,
        finish_reason, outcome and sample_id; with an environment also turn, episode_return,
        turn_rewards, turn_states and branches.

        greedy: take the most likely token each time (ReMax's baseline).
        Where the prompts have a column max_tokens, it limits each row's response, in tokens,
        instead of sampling.max_tokens.
        """

    def logprobs(self, batch: Batch, *, entropy: bool = False, topk: int = 0) -> Batch:
        """Compute column `role.column` (old_logprobs, ref_logprobs, ...): float32, [T] per row.

        `entropy` adds the column of that name; `topk` > 0 adds topk_ids and topk_logprobs.
        """

    def values(self, batch: Batch) -> Batch:
        """Compute column `role.column` (values, cost_values): V of the state before each token."""

    def score(self, batch: Batch) -> Batch:
        """Compute column `role.column` (scores, costs): float32, one per row.

        It is NaN for a row that has failed; where a rule leaves rows out (on_failure.mask), there
        are also `outcome` and a `loss_mask` with zeros for them.
        """

    # --- verbs that work on the weights ---

    def update(self, pairs: Sequence[Pair] | Pair) -> PendingResult:
        """Take one optimizer step over one or more (mini-batch, loss) pairs; gives Metrics."""

    def loss(self, batch: Batch, loss: Loss) -> PendingResult:
        """Compute the loss without an update; gives Metrics, which are not among the step's."""

    def sync(self) -> PendingResult:
        """Send the trained weights to the rollout engine; `generate` does so if they are newer."""


class StepContext(Typing):
    """The `ctx` of Algorithm.step. Roles are attributes: ctx.actor, ctx.critic, ctx.ref, ..."""

    # --- the run ---

    @property
    def roles(self) -> Mapping[str, RoleHandle]:
        """The roles of the run, by name."""

    sampling: SamplingParams
    """Sampling parameters of the run."""
    step: int
    """Number of the current step, from 1."""

    def __getattr__(self, name: str) -> RoleHandle:
        """Return a role. Raises AttributeError for one that the run does not have."""

    # --- data and numerical work ---

    def prompts(self, count: int, data: str = "train") -> Batch:
        """Draw the next `count` rows of [data], or of another of the algorithm's `data_sets`.

        Columns: prompt_ids, group (one number per drawn row) and meta. Data with responses adds
        response_ids and loss_mask. With data.rejected each drawn row gives two sequences, with the
        columns pair and preferred. Call it again to draw more (DAPO does).
        """

    def encode(self, texts: Sequence[str | Sequence[Mapping[str, Any]]]) -> Batch:
        """Return prompts that the algorithm has written: texts, or chats (lists of messages).

        They become tokens as those of [data], and have the columns prompt_ids, group (-1, -2 and so
        on in each call, which no drawn row has) and meta, {}. A text that cannot be encoded, or is
        longer than data.max_prompt_tokens, is a DataError of the call.
        """

    def decode(self, batch: Batch, column: str = "response_ids") -> list[str]:
        """Return the texts of a column of tokens, without special tokens. Waits for them."""

    def compute(self, function: Callable[..., dict[str, Any]], batch: Batch) -> Batch:
        """Run numerical work on the whole batch: one task on one worker.

        The names of `function`'s parameters are columns, and only these travel to the worker.
        Per-token columns arrive padded, [B, T, ...] with 0 on the right; per-row columns as
        [B, ...]; objects as lists. A parameter with a default may be missing from the batch.

        `function` returns a dict: [B, T, ...] tensors become per-token columns, [B] tensors
        per-row columns, and plain numbers become metrics.
        """

    def minibatches(
        self, batch: Batch, size: int, epochs: int = 1, unit: int = 1
    ) -> Iterator[Batch]:
        """Yield mini-batches of `size` rows (the last may be smaller), in a new order each epoch.

        Every row comes once per epoch. Runs of `unit` neighbouring rows stay together. A batch that
        is one mini-batch keeps its order. Raises ValueError if `unit` does not divide `size`.
        """

    # --- metrics ---

    def log(self, **values: float) -> None:
        """Report metrics of this step."""

    def aside(self) -> AbstractContextManager[None]:
        """Leave the calls made in this context out of the step's metrics (a baseline's, say).

        The end of the step does not wait for them: their errors are raised where their results are
        read.
        """
