"""GRPO: numbers computed by hand, and steps of a real run."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms
from hybridflow.kit.testing import TinyRun

SMALL = GRPOConfig(prompts_per_step=4, group_size=4)


class WithItsOwnForward(GRPO):
    """GRPO that asks for old_logprobs although there is one update."""

    on_policy = False


def advantages(scale: str, scores, group):
    algorithm = GRPO(attrs.evolve(SMALL, scale=scale))
    mask = torch.ones(len(scores), 2)
    return algorithm.advantages(torch.tensor(scores), torch.tensor(group), mask)["advantages"][:, 0].tolist()


def test_advantages_are_the_scores_normalised_within_their_group():
    # group 0: 1 and 0, mean 0.5, unbiased std 0.7071; group 1: 3, 0, 0, mean 1, std 1.7321; group 2: equal scores
    found = advantages("std", [1.0, 3.0, 0.0, 0.0, 0.0, 2.0, 2.0], [0, 1, 0, 1, 1, 2, 2])
    expected = [0.70711, 1.15470, -0.70711, -0.57735, -0.57735, 0.0, 0.0]
    assert found == pytest.approx(expected, abs=1e-5)


def test_without_the_division_they_are_centred():
    assert advantages("none", [1.0, 0.0, 3.0, 0.0], [5, 5, 9, 9]) == pytest.approx([0.5, -0.5, 1.5, -1.5])


def test_tokens_of_a_tool_have_no_advantage():
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    found = GRPO(SMALL).advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask)["advantages"]
    assert (found[mask == 0] == 0).all() and (found[mask == 1] != 0).all()


@pytest.mark.parametrize(
    ("how", "expected"),
    # rows of 1 and 3 tokens with loss 4 and 1, 2, 3 per token
    [("seq-mean-token-mean", (4 + 2) / 2), ("token-mean", 10 / 4)],
)
def test_the_mean_is_over_each_response_or_over_all_tokens(how, expected):
    batch = {"loss_mask": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])}
    batch["advantages"] = torch.tensor([[-4.0, 0.0, 0.0], [-1.0, -2.0, -3.0]])
    loss = GRPO(attrs.evolve(SMALL, how=how)).losses()["actor"]
    found = loss(batch, {"logprobs": torch.full((2, 3), -1.0)})
    total, _ = reduce_terms(found, batch["loss_mask"], Counts(4, 2, 2), Counts(4, 2, 2))
    assert float(total) == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "kl"), [("k3", math.exp(-0.5) - 1 + 0.5), ("k2", 0.125)])
def test_the_kl_term_is_the_estimate_computed_by_hand(kind, kl):
    loss = PolicyLoss(PolicyConfig(kl_kind=kind), on_policy=True, kl_coef=0.2)
    assert loss.reads == ["advantages", "ref_logprobs"]
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    batch = {"loss_mask": torch.ones(1, 1), "advantages": torch.zeros(1, 1), "ref_logprobs": torch.tensor([[-1.5]])}
    found = loss(batch, {"logprobs": logprobs})
    total, _ = reduce_terms(found, batch["loss_mask"], Counts(1, 1, 1), Counts(1, 1, 1))
    assert float(total.detach()) == pytest.approx(0.2 * kl, rel=1e-5)
    total.backward()
    slope = 1 - math.exp(-0.5) if kind == "k3" else 0.5  # d/dx of exp(-d) - 1 + d, and of d^2 / 2
    assert float(logprobs.grad) == pytest.approx(0.2 * slope, rel=1e-5)


def test_old_logprobs_are_needed_only_with_several_updates():
    several = (dict(epochs=2), dict(mini_batch_size=8))
    assert GRPO(SMALL).on_policy and "old_logprobs" not in GRPO(SMALL).losses()["actor"].reads
    for settings in several:
        algorithm = GRPO(attrs.evolve(SMALL, **settings))
        assert not algorithm.on_policy and algorithm.updates_per_step() == 2
        assert "old_logprobs" in algorithm.losses()["actor"].reads


def test_on_policy_steps_without_old_logprobs_are_those_with_them():
    found = []
    for algorithm in (GRPO(SMALL), WithItsOwnForward(SMALL)):
        with TinyRun(algorithm, {"actor": {"optimizer": {"lr": 1e-2, "eps": 1e-4}}}) as run:
            before = run.weights("actor")
            metrics = run.step()
            found.append(({n: p - before[n] for n, p in run.weights("actor").items()}, metrics))
    (plain, metrics), (asked, with_them) = found
    assert any(move.abs().max() > 1e-3 for move in plain.values())
    for name, move in plain.items():
        torch.testing.assert_close(move, asked[name], atol=2e-5, rtol=1e-3)
    assert metrics["actor/policy_loss"] == pytest.approx(with_them["actor/policy_loss"], abs=1e-5)
    assert metrics["actor/clip_fraction"] == with_them["actor/clip_fraction"] == 0.0


def test_a_run_with_the_kl_begins_at_zero_kl_and_has_a_reference():
    with TinyRun(GRPO(attrs.evolve(SMALL, kl_coef=0.1))) as run:
        metrics = [run.step(), run.step()]
        assert set(run.job.models) == {"actor", "ref"}
    assert metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and metrics[1]["actor/kl_loss"] > 0


def test_the_reward_rises():
    config = GRPOConfig(prompts_per_step=8, group_size=8)
    with TinyRun(GRPO(config), {"actor": {"optimizer": {"lr": 5e-3}}}) as run:
        scores = [run.step()["reward/scores"] for _ in range(10)]
    assert sum(scores[-3:]) / 3 > sum(scores[:2]) / 2 + 0.15


def test_settings_that_contradict_each_other_are_named():
    assert "larger than the 16 sequences" in GRPO(attrs.evolve(SMALL, mini_batch_size=17)).problems()[0]
    assert GRPO(SMALL).problems() == [] and GRPO(SMALL).rows_per_step == 16
