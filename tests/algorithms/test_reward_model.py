"""Reward models: the loss of pairs by hand, and what they learn in a real run."""

from __future__ import annotations

import torch
from helpers.pair_rows import DATA, late_over_early, log_sigmoid, values

from hybridflow.algorithms.reward_model import PreferenceLoss, RewardModel, RewardModelConfig
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import TABLES

LEARNS = {**TABLES["actor"], "micro_batch_tokens": 30, "optimizer": {"lr": 3e-3}}


def test_the_preference_loss_by_hand():
    # pairs (2, 1) and (0, 3), the better one first in one and last in the other
    batch = {"preferred": torch.tensor([1, 0, 0, 1])}
    found = values(
        PreferenceLoss(margin=0.5)(batch, {"scores": torch.tensor([2.0, 1.0, 0.0, 3.0])})
    )
    assert found["preference_loss"] == [-log_sigmoid(0.5), -log_sigmoid(2.5)]
    assert found["accuracy"] == [1.0, 1.0]


def test_pairs_in_the_wrong_order_are_counted():
    batch = {"preferred": torch.tensor([1, 0, 0, 1, 1, 0])}
    found = values(
        PreferenceLoss()(batch, {"scores": torch.tensor([0.0, 1.0, 2.0, 1.0, 3.0, 2.0])})
    )
    assert found["accuracy"] == [0.0, 0.0, 1.0]


def test_a_reward_model_learns_the_order_of_pairs():
    with TinyRun(
        RewardModel(RewardModelConfig(pairs_per_step=16)), {"data": DATA, "reward": LEARNS}
    ) as run:
        metrics = [run.step() for _ in range(16)]
        assert set(run.job.models) == {"reward"}  # no other role is loaded
        assert run.worker("reward").backend.version == 16
    assert late_over_early(metrics, "reward/accuracy", 4, 2) > 0.2


def test_a_step_draws_two_sequences_for_each_pair():
    algorithm = RewardModel(RewardModelConfig(pairs_per_step=3))
    assert (algorithm.rows_per_step, algorithm.updates_per_step()) == (6, 1)
    [role] = algorithm.roles()
    assert (role.name, role.kind, role.trained) == ("reward", "score", True)
