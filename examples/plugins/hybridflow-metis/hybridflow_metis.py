"""METIS: before it answers, the policy judges how much each prompt's rewards will vary (arXiv:2605.11235)."""

from __future__ import annotations

import math
import re

import attrs
import numpy as np
import torch

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.core.validators import at_least, non_negative, share

INSTRUCTION = """\
A problem teaches you most where the rewards of your answers to it vary: their variance is 0 where you
always or never solve it, and 0.25 where you solve it half of the time.

"""
EXAMPLE = "Problem: {prompt}\nVariance: {variance:.2f}\n\n"
QUESTION = """\
Problem: {prompt}
In one short sentence, how well can you solve it now? End with a number from 0 to 0.25.
Variance:"""
NUMBER = re.compile(r"\d*\.\d+|\d+")


@attrs.frozen
class METISConfig(GRPOConfig):
    """Settings of METIS over GRPO. Rewards are between 0 and 1, as their variance is asked for.

    data.max_prompt_tokens must hold the texts below with examples + 1 prompts in them.
    The paper gives K = 3 and the coefficient 0.01; pool_factor, decay and the texts are ours.
    """

    pool_factor: int = attrs.field(default=2, validator=at_least(1))
    """m: of m prompts_per_step prompts, those that are judged to vary most are answered."""
    examples: int = attrs.field(default=3, validator=non_negative)
    """K: how many of the prompts that were answered last are shown with their variances."""
    judgement_coef: float = attrs.field(default=0.01, validator=non_negative)
    """Weight of the judgements' loss."""
    judgement_tokens: int = attrs.field(default=256, validator=at_least(1))
    """Most tokens of a judgement; it has no more than sampling.max_tokens either."""
    decay: float = attrs.field(default=0.9, validator=share)
    """Share of the judgements' baseline that a step leaves as it was."""
    instruction: str = INSTRUCTION
    """How the text of a judgement begins."""
    example: str = EXAMPLE
    """What shows an answered prompt, by {prompt} and {variance}."""
    question: str = QUESTION
    """What asks about {prompt}; the last number of the response is the judgement."""
    chat: bool = False
    """Whether this text is a user's message, in the tokenizer's chat template."""


class JudgementLoss(PolicyLoss):
    """REINFORCE on the tokens of judgements: the ratio is to the present weights themselves."""

    def __init__(self, config):
        super().__init__(attrs.evolve(config, old_logprobs="trainer"), on_policy=True)

    def __call__(self, batch, outputs):
        policy, *_ = super().__call__(batch, outputs)
        return attrs.evolve(policy, name="judgement_loss", weight=self.config.judgement_coef)


class METIS(GRPO):
    """GRPO on the prompts that the policy judges to teach it most; the judgements are trained too.

    Metrics: readable, the share of judgements with a number in it; variance, of the rewards to a prompt;
    judgement_reward, 1 for the right variance and 0 for one that is 0.25 off or cannot be read.
    """

    Config = METISConfig

    def __init__(self, config):
        super().__init__(config)
        self.shown: list[list] = []
        """[prompt, variance] of the last prompts that were answered."""
        self.baseline: float | None = None

    def step(self, ctx):
        config, count = self.config, self.config.prompts_per_step
        losses = self.losses()
        about = JudgementLoss(config)

        # Every prompt of the pool is judged, and those are answered that may vary most.
        pool = ctx.prompts(config.pool_factor * count)
        texts = ctx.decode(pool, "prompt_ids")
        questions = ctx.encode([self.asked(text) for text in texts])
        tokens = min(config.judgement_tokens, ctx.sampling.max_tokens)
        with ctx.aside():
            sampling = attrs.evolve(ctx.sampling, max_tokens=tokens)
            judged = ctx.actor.generate(questions, sampling=sampling)
        predicted = np.array([judgement(text) for text in ctx.decode(judged)])
        chosen = np.argsort(-np.nan_to_num(predicted, nan=-1.0), kind="stable")[:count]

        # GRPO's generation and inference.
        batch = ctx.actor.generate(pool.take(chosen).repeat(config.group_size))
        inferred = [ctx.reward.score(batch)]
        if config.kl_coef:
            inferred.append(ctx.ref.logprobs(batch))
        if self.reads_old_logprobs:
            inferred.append(ctx.actor.logprobs(batch))
        batch = batch.join(*inferred)
        advantages = ctx.compute(self.advantages, batch)

        # How the rewards varied, and how well that was said.
        observed = variances(np.asarray(batch["scores"].values).reshape(count, -1))
        rewards = judgement_rewards(predicted[chosen], observed)
        ctx.log(readable=float(np.mean(~np.isnan(predicted))))
        for name, values in (("variance", observed), ("judgement_reward", rewards)):
            if (known := ~np.isnan(values)).any():
                ctx.log(**{name: float(values[known].mean())})
        better = torch.from_numpy(self.compared(rewards)).float()
        judged = judged.take(chosen).with_columns(better=better)
        judged = judged.join(ctx.compute(at_each_token, judged))
        self.remember([texts[at] for at in chosen], observed)

        # Each update has its share of the judgements.
        parts = np.array_split(np.arange(count), self.updates_per_step())
        for mini, part in zip(self.minibatches(ctx, batch.join(advantages)), parts, strict=True):
            pairs = [(mini, losses["actor"]), *self.pretraining(ctx)]
            if len(part):
                pairs.append((judged.take(part), about))
            ctx.actor.update(pairs)
        self.kl.follow(advantages, batch.rows)

    def asked(self, prompt):
        """The text, or chat, that asks for a judgement of a prompt."""
        config = self.config
        shown = [config.example.format(prompt=text, variance=v) for text, v in self.shown]
        text = config.instruction + "".join(shown) + config.question.format(prompt=prompt)
        return [{"role": "user", "content": text}] if config.chat else text

    def compared(self, rewards):
        """The rewards of judgements less the moving average of those before; 0 where there is none, float [B]."""
        known = ~np.isnan(rewards)
        if not known.any():
            return np.zeros(len(rewards))
        mean = float(rewards[known].mean())
        before = mean if self.baseline is None else self.baseline
        self.baseline = self.config.decay * before + (1 - self.config.decay) * mean
        return np.where(known, rewards - before, 0.0)

    def remember(self, prompts, observed):
        """Show the last of these prompts from the next step on."""
        told = [[text, float(v)] for text, v in zip(prompts, observed, strict=True) if v == v]
        told = [*self.shown, *told]
        self.shown = told[max(len(told) - self.config.examples, 0) :]

    def state_dict(self):
        return {**super().state_dict(), "shown": self.shown, "baseline": self.baseline}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.shown, self.baseline = state["shown"], state["baseline"]


def at_each_token(better, loss_mask):
    return {"advantages": better[:, None] * loss_mask}


def judgement(text):
    """The variance that a judgement ends with, cut to [0, 0.25]; NaN where it has no number."""
    numbers = NUMBER.findall(text)
    return min(float(numbers[-1]), 0.25) if numbers else math.nan


def variances(scores):
    """v(x) = (1/n) sum (r_i - mean)^2 of each prompt's rewards, [B, n] -> [B]; rewards of NaN do not count."""
    known = ~np.isnan(scores)
    counts = known.sum(1)
    mean = np.where(known, scores, 0).sum(1) / np.maximum(counts, 1)
    squares = np.where(known, scores - mean[:, None], 0) ** 2
    return np.where(counts > 0, squares.sum(1) / np.maximum(counts, 1), np.nan)


def judgement_rewards(predicted, observed):
    """R = 1 - (4 (v' - v))^2 [B]; 0 where nothing was predicted, NaN where nothing was observed."""
    rewards = 1 - (4 * (predicted - observed)) ** 2
    return np.where(np.isnan(predicted) & ~np.isnan(observed), 0.0, rewards)
