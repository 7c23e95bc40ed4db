"""Every invariant of AlgorithmConformance notices the fault that it is for."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.expect import caught

from hybridflow.algorithms.sft import SFT, NextTokenLoss, SFTConfig
from hybridflow.core.contracts.role import Role
from hybridflow.kit.testing import AlgorithmConformance


class Kit(AlgorithmConformance):
    pass


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
    def problems(self):
        return ["batch_size is odd"]


class NeverUpdates(SFT):
    def step(self, ctx):
        ctx.actor.loss(ctx.prompts(self.config.batch_size), self.losses()["actor"]).result()
        ctx.log(drawn=1.0)


class BadMetric(SFT):
    def step(self, ctx):
        super().step(ctx)
        ctx.log(share=float("nan"))


class OwnRandomness(SFT):
    """Draws from a generator of its own, whose state is in no checkpoint: after a resume it begins anew."""

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
        ctx.actor.update((ctx.prompts(self.config.batch_size).take([0] * self.seen), self.losses()["actor"]))


class TensorState(SFT):
    def state_dict(self):
        return {"seen": torch.zeros(1)}


class HalfState(SFT):
    seen = 5

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = 0


FAULTS = [
    (TwoActors, "test_its_roles_can_be_used", "no name twice"),
    (HiddenRole, "test_its_roles_can_be_used", "log"),
    (NoLosses, "test_its_losses_are_those_of_its_trained_roles", "losses() is not overridden"),
    (LossOfAFrozenRole, "test_its_losses_are_those_of_its_trained_roles", "trained=True"),
    (PlainConfig, "test_its_config_is_a_frozen_attrs_class_with_checks", "attrs.frozen"),
    (NoUpdates, "test_its_config_is_a_frozen_attrs_class_with_checks", "rounds down"),
    (UnhappyConfig, "test_its_config_is_a_frozen_attrs_class_with_checks", "batch_size is odd"),
    (NeverUpdates, "test_it_trains", "never calls"),
    (BadMetric, "test_it_trains", "share"),
    (OwnRandomness, "test_a_resumed_run_goes_on_bit_for_bit", "instead of ctx"),
    (ForgetsItsState, "test_a_resumed_run_goes_on_bit_for_bit", "state_dict"),
    (TensorState, "test_its_state_survives_json", "tolist"),
    (HalfState, "test_its_state_survives_json", "leaves something out"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "method", "says"), FAULTS, ids=[f"{f.__name__}-{m}" for f, m, _ in FAULTS])
def test_the_fault_is_noticed(fault, method, says, tmp_path):
    fixtures = {"tmp_path": tmp_path} if method == "test_a_resumed_run_goes_on_bit_for_bit" else {}
    caught(Kit, method, says, algorithm=fault(SFTConfig(batch_size=4)), **fixtures)


def test_each_invariant_has_a_fault():
    own = {m for m in vars(AlgorithmConformance) if m.startswith("test_")}
    assert own == {method for _, method, _ in FAULTS}


def test_settings_travel_to_the_run():
    from hybridflow.kit.testing.runs import TinyRun, algorithm_table

    algorithm = TwoActors(SFTConfig(batch_size=3))
    table = algorithm_table(algorithm)
    assert table["batch_size"] == 3 and table["name"].endswith("test_algorithm_faults:TwoActors")
    run = TinyRun({"name": "sft", "batch_size": 3}, {"actor": {"micro_batch_tokens": 64}})
    assert run.algorithm.config == attrs.evolve(SFTConfig(), batch_size=3)


def test_a_class_inside_a_function_cannot_be_run():
    class Local(SFT):
        pass

    with pytest.raises(ValueError, match="top level"):
        Kit().test_it_trains(Local(SFTConfig(batch_size=4)))
