"""Every invariant of AlgorithmConformance notices the fault that it is for."""

from __future__ import annotations

import numpy as np
import torch
from helpers.expect import caught, each_fault

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.sft import SFT, NextTokenLoss, SFTConfig
from hybridflow.core.contracts.role import Role
from hybridflow.kit.testing import AlgorithmConformance


class Plain:
    batch_size = 4


class TwoActors(SFT):
    def roles(self):
        return (Role("actor", trained=True), Role("actor", trained=True))


class HiddenRole(SFT):
    """ctx.log is taken."""

    def roles(self):
        return (Role("actor", trained=True), Role("log"))


class NoLosses(SFT):
    def losses(self):
        return {}


class LossOfAFrozenRole(SFT):
    def roles(self):
        return (*super().roles(), Role("ref"))

    def losses(self):
        return {**super().losses(), "ref": NextTokenLoss()}


class PlainConfig(SFT):
    Config = Plain


class NoUpdates(SFT):
    def updates_per_step(self):
        return self.config.batch_size // 1000


class UnhappyConfig(SFT):
    def problems(self, sampling):
        return ["batch_size is odd"]


class NeverUpdates(SFT):
    def step(self, ctx):
        rows = ctx.prompts(self.config.batch_size)
        ctx.actor.loss(rows, self.losses()["actor"]).result()
        ctx.log(drawn=1.0)


class BadMetric(SFT):
    def step(self, ctx):
        super().step(ctx)
        ctx.log(share=float("nan"))


class OwnRandomness(SFT):
    """Draws from a generator of its own, which begins anew after a resume."""

    def __init__(self, config):
        super().__init__(config)
        self.random = np.random.default_rng(0)

    def step(self, ctx):
        kept = self.random.permutation(self.config.batch_size)[:2]
        ctx.actor.update((ctx.prompts(self.config.batch_size).take(kept), self.losses()["actor"]))


class ForgetsItsState(SFT):
    """A curriculum whose position is in no checkpoint."""

    seen = 0

    def step(self, ctx):
        self.seen += 1
        rows = ctx.prompts(self.config.batch_size).take([0] * self.seen)
        ctx.actor.update((rows, self.losses()["actor"]))


class TensorState(SFT):
    def state_dict(self):
        return {"seen": torch.zeros(1)}


class HalfState(SFT):
    seen = 5

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = 0


class OwnMean(GRPO):
    """Its group means take in the scores of failed rows."""

    def advantages(self, scores, group, loss_mask):
        grouped = scores.view(-1, self.config.group_size)
        centred = (grouped - grouped.mean(1, keepdim=True)).view(-1, 1)
        return {"advantages": centred * loss_mask}


class ClaimsToCorrect(GRPO):
    """Its loss is as ever."""

    corrects_staleness = True


class SharedCurriculum(GRPO):
    """Its class goes on where the run before has ended."""

    seen = 0

    def step(self, ctx):
        type(self).seen += 1
        super().step(ctx)

    def advantages(self, scores, group, loss_mask):
        return {"advantages": self.seen * scores[:, None] * loss_mask}


class TrainsOldRows(GRPO):
    """Keeps the responses of each step for the one after the next."""

    def step(self, ctx):
        kept = self.__dict__.setdefault("kept", [])
        batch = ctx.actor.generate(ctx.prompts(4).repeat(4))
        batch = batch.join(ctx.reward.score(batch))
        kept.append(batch.join(ctx.compute(self.advantages, batch)))
        ctx.actor.update((kept[max(len(kept) - 3, 0)], self.losses()["actor"]))


FAULTS = {
    "test_its_roles_can_be_used": [TwoActors, HiddenRole],
    "test_its_losses_are_those_of_its_trained_roles": [NoLosses, LossOfAFrozenRole],
    "test_its_config_is_a_frozen_attrs_class_with_checks": [PlainConfig, NoUpdates, UnhappyConfig],
    "test_it_trains": [NeverUpdates, BadMetric],
    "test_it_does_without_rows_that_have_failed": [OwnMean],
    "test_a_resumed_run_goes_on_bit_for_bit": [OwnRandomness, ForgetsItsState],
    "test_it_runs_a_step_ahead": [ClaimsToCorrect, SharedCurriculum, TrainsOldRows],
    "test_its_state_survives_json": [TensorState, HalfState],
}


@each_fault(AlgorithmConformance, FAULTS)
def test_the_fault_is_noticed(fault, method, tmp_path):
    fixtures = {"tmp_path": tmp_path} if "resumed" in method else {}
    if issubclass(fault, GRPO):
        algorithm = fault(GRPOConfig(prompts_per_step=4, group_size=4))
    else:
        algorithm = fault(SFTConfig(batch_size=4))
    caught(AlgorithmConformance, method, algorithm=algorithm, **fixtures)
