"""ReMax: the advantages by hand, and a step of a real run whose baseline is the greedy response's score."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import plain
from helpers.steps import Watched, close, minus_mean, rewind, scored

from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.kit.testing import TinyRun


class Kept(Watched, ReMax):
    pass


def test_remax_subtracts_the_greedy_score_from_the_rewards_to_go():
    found = scored(
        ReMax(ReMaxConfig(kl_coef=0.1)), [1.0, 0.0], None, baseline_scores=torch.tensor([0.25, 0.5])
    )
    # row 0: rewards -0.05, 0.1 + 1; to go 1.05, 1.1; less 0.25.  row 1: -0.1, 0.1; to go 0, 0.1; less 0.5
    close(found["advantages"], [[0.8, 0.85, 0.0], [-0.5, 0.0, -0.4]])
    assert float(found["baseline"]) == 0.375


def test_a_steps_baseline_is_the_score_of_the_greedy_response():
    with TinyRun(Kept(ReMaxConfig(prompts_per_step=4, group_size=2, kl_coef=0.0))) as run:
        greedy = run.ctx.reward.score(run.ctx.actor.generate(run.ctx.prompts(4), greedy=True))
        baselines = plain(greedy["scores"])
        run.ctx.finish()
        rewind(run)
        metrics = run.step()
        batch = run.algorithm.batch
    scores, found, advantages = (
        plain(batch[name]) for name in ("scores", "baseline_scores", "advantages")
    )
    assert found == [score for score in baselines for _ in range(2)]
    for score, baseline, row in zip(scores, found, advantages, strict=True):
        assert row == pytest.approx([score - baseline] * len(row), abs=1e-6)
    assert metrics["baseline"] == pytest.approx(sum(baselines) / 4, rel=1e-6)
    assert metrics["reward/scores"] == pytest.approx(
        sum(scores) / 8, rel=1e-6
    )  # not the greedy ones'
    want = minus_mean(advantages, "seq-mean-token-sum")
    assert metrics["actor/policy_loss"] == pytest.approx(want, abs=1e-5)
