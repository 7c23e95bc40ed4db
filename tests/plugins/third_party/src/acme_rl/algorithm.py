"""REINFORCE (Williams, 1992) with the mean score of the batch as its baseline, and a loss of its own."""

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role


@attrs.frozen
class Config:
    prompts_per_step: int = 8
    """Prompts drawn per step."""
    momentum: float = 0.5
    """How much of the old baseline stays."""


class Reinforce(Loss):
    """-log p of each token times its sequence's advantage."""

    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return [Term("reinforce", -outputs["logprobs"] * batch["advantages"])]


class BatchBaseline(Algorithm):
    """A role of its own (`twin`, a frozen policy), state of its own (the baseline), figures of its own."""

    Config = Config

    def __init__(self, config):
        super().__init__(config)
        self.baseline = 0.0

    def roles(self):
        actor = Role("actor", trained=True, generates=True)
        return (actor, Role("twin"), Role("reward", "reward"))

    def updates_per_step(self):
        return 1

    def step(self, ctx):
        batch = ctx.actor.generate(ctx.prompts(self.config.prompts_per_step))
        batch = batch.join(ctx.reward.score(batch), ctx.twin.logprobs(batch))
        computed = ctx.compute(self.advantages, batch)
        ctx.actor.update((batch.join(computed), Reinforce()))
        kept = self.config.momentum
        self.baseline = kept * self.baseline + (1 - kept) * computed.metrics["mean_score"]
        ctx.log(baseline=self.baseline)

    def advantages(self, scores, twin_logprobs, loss_mask):
        """[B], [B, T], [B, T] -> advantages [B, T]."""
        centred = (scores - self.baseline)[:, None] * loss_mask
        twin = (twin_logprobs * loss_mask).sum() / loss_mask.sum()
        return {"advantages": centred, "mean_score": scores.mean(), "twin_logprob": twin}

    def losses(self):
        return {"actor": Reinforce()}

    def state_dict(self):
        return {"baseline": self.baseline}

    def load_state_dict(self, state):
        self.baseline = state["baseline"]
