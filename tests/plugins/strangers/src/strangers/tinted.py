"""REINFORCE on rows that carry a column of their own, which only this backend and this engine understand."""

import attrs
import torch

from hybridflow.core import Algorithm, Loss, Role, Term


@attrs.frozen
class TintedConfig:
    prompts: int = 4
    """Prompts of a step."""
    tint: float = 0.0
    """Added to the logit of token 5 in the last row; rows before it get less."""


class Reinforce(Loss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return Term("reinforce", -batch["advantages"] * outputs["logprobs"])


class Tinted(Algorithm):
    Config = TintedConfig

    def roles(self):
        return Role("actor", trained=True, generates=True), Role("reward", "reward")

    def losses(self):
        return {"actor": Reinforce()}

    @property
    def rows_per_step(self):
        return self.config.prompts

    def step(self, ctx):
        prompts = ctx.prompts(self.config.prompts)
        tint = torch.linspace(0.0, self.config.tint, self.config.prompts)
        batch = ctx.actor.generate(prompts.with_columns(tint=tint))
        batch = batch.join(ctx.reward.score(batch), ctx.actor.logprobs(batch))
        batch = batch.join(ctx.compute(advantages, batch))
        ctx.log(fives=sum(int((ids == 5).sum()) for ids in batch["response_ids"]))
        ctx.actor.update((batch, self.losses()["actor"]))


def advantages(scores, loss_mask):
    return {"advantages": (scores - scores.nanmean())[:, None] * loss_mask}
