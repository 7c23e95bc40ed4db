"""REINFORCE++ and its form with a baseline: the advantages by hand, and steps of real runs."""

from __future__ import annotations

import statistics

import pytest
import torch
from helpers.batches import plain
from helpers.steps import MASK, Watched, close, members, minus_mean, scored

from hybridflow.algorithms.reinforce_pp import (
    ReinforcePP,
    ReinforcePPBaseline,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
)
from hybridflow.kit.testing import TinyRun


class Kept(Watched, ReinforcePP):
    pass


class KeptBaseline(Watched, ReinforcePPBaseline):
    pass


def whitened(rows):
    """Over all tokens, with the unbiased variance."""
    every = [value for row in rows for value in row]
    mean, spread = statistics.fmean(every), statistics.stdev(every)
    return [pytest.approx([(value - mean) / spread for value in row], abs=1e-4) for row in rows]


def test_reinforce_pp_whitens_the_rewards_to_go_over_the_batch():
    found = scored(ReinforcePP(ReinforcePPConfig(kl_coef=0.1)), [1.0, 0.0], None)
    # to go 1.05, 1.1, 0, 0.1: mean 0.5625; squared deviations 0.2376562 0.2889062 0.3164062 0.2139062, variance 0.3522917
    spread = (1.056875 / 3) ** 0.5
    want = [[0.4875 / spread, 0.5375 / spread, 0.0], [-0.5625 / spread, 0.0, -0.4625 / spread]]
    close(found["advantages"], want)


def test_reinforce_pp_discounts_over_the_tokens_of_the_policy_alone():
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=0.0, gamma=0.5))
    found = algorithm.advantages(torch.tensor([1.0, 2.0]), MASK)
    # to go 0.5, 1 and 1, (hole), 2: mean 1.125, deviations -0.625 -0.125 -0.125 0.875, variance 1.1875 / 3
    spread = (1.1875 / 3) ** 0.5
    close(
        found["advantages"],
        [[-0.625 / spread, -0.125 / spread, 0.0], [-0.125 / spread, 0.0, 0.875 / spread]],
    )


def test_the_baseline_form_subtracts_the_groups_mean_and_whitens():
    algorithm = ReinforcePPBaseline(ReinforcePPBaselineConfig(kl_coef=0.0))
    found = algorithm.advantages(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), MASK)
    # 0.5 twice and -0.5 twice: mean 0, variance 1 / 3
    close(
        found["advantages"],
        [[0.5 * 3**0.5, 0.5 * 3**0.5, 0.0], [-0.5 * 3**0.5, 0.0, -0.5 * 3**0.5]],
    )
    assert algorithm.losses()["actor"].reads == ["advantages"]
    assert (
        "ref_logprobs" in ReinforcePPBaseline(ReinforcePPBaselineConfig()).losses()["actor"].reads
    )


def test_a_step_whitens_the_scores_over_the_tokens_of_the_batch():
    with TinyRun(
        Kept(ReinforcePPConfig(prompts_per_step=8, kl_coef=0.0, how="seq-mean-token-mean"))
    ) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    scores, advantages = plain(batch["scores"]), plain(batch["advantages"])
    assert advantages == whitened(
        [[score] * len(row) for score, row in zip(scores, advantages, strict=True)]
    )
    loss = minus_mean(advantages, "seq-mean-token-mean")
    assert metrics["actor/policy_loss"] == pytest.approx(loss, abs=1e-5)
    assert abs(loss) > 1e-3, "the test needs responses of unequal lengths"


def test_a_step_with_the_groups_mean_whitens_what_is_left():
    config = ReinforcePPBaselineConfig(prompts_per_step=4, group_size=4, kl_coef=0.0)
    with TinyRun(KeptBaseline(config)) as run:
        run.step()
        batch = run.algorithm.batch
    scores, group, advantages = (plain(batch[name]) for name in ("scores", "group", "advantages"))
    centred = [score - sum(members(scores, group, at)) / 4 for at, score in enumerate(scores)]
    assert advantages == whitened(
        [[value] * len(row) for value, row in zip(centred, advantages, strict=True)]
    )
