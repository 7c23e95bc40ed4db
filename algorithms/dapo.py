"""DAPO: GRPO that clips higher, averages over tokens and punishes overlong responses.

Groups of equal scores teach nothing and are left out; more prompts are drawn until the batch is
full. The source is arXiv:2503.14476.
"""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import AGGREGATIONS
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.step import StepContext
from hybridflow.core.validators import at_least, non_negative, positive
from hybridflow.core.values.batch import Batch


@attrs.frozen
class DAPOConfig(GRPOConfig):
    """Settings of decoupled clip and dynamic sampling policy optimisation."""

    clip_high: float = attrs.field(default=0.28, validator=positive)
    """Upper limit of the ratio new/old, above the lower one (the paper's "clip-higher")."""
    how: str = attrs.field(default="token-mean", validator=AGGREGATIONS)
    """How the loss is averaged; the paper takes the mean over all tokens."""
    max_draws: int = attrs.field(default=10, validator=at_least(1))
    """How often a step may draw prompts_per_step prompts before it trains on a batch not full."""
    overlong_cache: int = attrs.field(default=0, validator=non_negative)
    """Number of tokens before sampling.max_tokens over which a response's score falls linearly by
    up to 1 (eq. 13); 0: no punishment."""


class DAPO(GRPO):
    """GRPO's step on groups whose scores, before the punishment of length, are not all equal.

    Metrics: draws; kept, the share of responses in groups of unequal scores; filled, which is below
    1 if max_draws did not fill the batch.
    """

    Config = DAPOConfig

    def step(self, ctx: StepContext) -> None:
        """Draw prompts until the batch is full of groups of unequal scores, then update."""
        config = self.config
        losses = self.losses()
        full = self.rows_per_step

        # Dynamic sampling (algorithm 1, lines 4 to 8).
        parts: list[Batch] = []
        draws = 0
        rows = 0
        while rows < full and draws < config.max_draws:
            prompts = ctx.prompts(config.prompts_per_step)
            batch = ctx.actor.generate(prompts.repeat(config.group_size))
            inferred = [ctx.reward.score(batch)]
            if config.kl_coef:
                inferred.append(ctx.ref.logprobs(batch))
            if self.reads_old_logprobs:
                inferred.append(ctx.actor.logprobs(batch))
            batch = batch.join(*inferred)
            parts.append(batch.take(self.unequal(batch)))
            rows += parts[-1].rows
            draws += 1
        share = rows / (draws * full)
        ctx.log(draws=draws, kept=share, filled=min(rows / full, 1.0))
        if not rows:  # all groups had equal scores
            return

        # The last draw may have given more than the batch needs.
        nonempty = [part for part in parts if part.rows]
        batch = Batch.concat(nonempty).take(slice(0, full))
        of_limit = partial(self.advantages, limit=ctx.sampling.max_tokens)
        advantages = ctx.compute(of_limit, batch)

        # Training.
        for mini in self.minibatches(ctx, batch.join(advantages)):
            ctx.actor.update([(mini, losses["actor"]), *self.pretraining(ctx)])

        # An adaptive KL coefficient moves once a step.
        self.kl.follow(advantages, batch.rows)

    def problems(self, sampling: SamplingParams) -> list[str]:
        problems = super().problems(sampling)
        cache = self.config.overlong_cache
        if cache > sampling.max_tokens:
            problems.append(
                f"overlong_cache {cache} is more than the {sampling.max_tokens} tokens of a "
                "response (sampling.max_tokens), the last of which it punishes"
            )
        return problems

    def advantages(self, scores, group, loss_mask, old_logprobs=None, ref_logprobs=None, limit=0):
        """Return GRPO's advantages from scores with the punishment of overlong responses added.

        limit: the largest number of tokens of a response.
        """
        # `unequal` looks at scores without this punishment: groups are chosen before it.
        cache = self.config.overlong_cache
        if cache:
            scores = scores + F.overlong_punishment(loss_mask.sum(1), limit, cache)
        return super().advantages(scores, group, loss_mask, old_logprobs, ref_logprobs)

    def unequal(self, batch: Batch) -> np.ndarray:
        """Return for each row whether the scores of its group differ, bool [B]; NaN is no score."""
        size = self.config.group_size
        scores = torch.as_tensor(batch["scores"].values).view(-1, size)
        lowest = scores.nan_to_num(torch.inf).amin(1)
        highest = scores.nan_to_num(-torch.inf).amax(1)
        return (highest > lowest).repeat_interleave(size).numpy()
