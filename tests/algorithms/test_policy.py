"""The policy loss that the policy-gradient algorithms share: clip, entropy, KL, correction, means; by hand."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from hybridflow.algorithms.policy import (
    AggregationConfig,
    ClippedConfig,
    CorrectionConfig,
    PolicyConfig,
    PolicyLoss,
)
from hybridflow.algorithms.policy_gradient import PretrainConfig
from hybridflow.algorithms.reference_kl import KLConfig
from hybridflow.core.contracts.loss import Counts
from hybridflow.core.workers.reduction import reduce_terms


@attrs.frozen
class Corrected(PolicyConfig, CorrectionConfig):
    pass


def terms(loss, batch: dict, outputs: dict) -> dict:
    """The loss's terms on [B, T] lists, by name."""
    tensors = {name: torch.tensor(value) for name, value in batch.items()}
    outputs = {"entropy": [[0.0, 0.0]], **outputs}
    found = loss(
        {"loss_mask": torch.ones(1, 2), **tensors}, {n: torch.tensor(v) for n, v in outputs.items()}
    )
    return {term.name: term for term in found}


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss"),
    [
        (1.5, 1.0, None, -1.2),  # clipped at 1 + clip_high
        (0.5, 1.0, None, -0.5),  # worse than the bound: not clipped
        (0.5, -1.0, None, 0.7),  # clipped at 1 - clip_low
        (1.5, -1.0, None, 1.5),
        (5.0, -1.0, 3.0, 3.0),  # dual clip: at most 3 |A|
        (5.0, 1.0, 3.0, -1.2),
    ],
)
def test_the_policy_loss_is_clipped_as_by_hand(ratio, advantage, dual_clip, loss):
    config = ClippedConfig(clip_low=0.3, clip_high=0.2, dual_clip=dual_clip)
    batch = dict(old_logprobs=[[-1.0, -1.0]], advantages=[[advantage, 0.0]])
    found = terms(PolicyLoss(config), batch, dict(logprobs=[[-1.0 + math.log(ratio), -1.0]]))
    assert found["policy_loss"].value[0].tolist() == pytest.approx([loss, 0.0], abs=1e-6)
    assert found["clip_fraction"].value[0].tolist() == [float(not 0.7 <= ratio <= 1.2), 0.0]
    d = math.log(ratio)  # k3 of KL(old || new)
    assert found["approx_kl"].value[0].tolist() == pytest.approx(
        [math.exp(d) - 1 - d, 0.0], abs=1e-5
    )


def test_the_entropy_bonus_lowers_the_loss():
    batch = dict(old_logprobs=[[-1.0, -1.0]], advantages=[[1.0, 1.0]])
    outputs = dict(logprobs=[[-1.0, -1.0]], entropy=[[2.0, 4.0]])
    loss = PolicyLoss(PolicyConfig(entropy_coef=0.1))
    assert loss.needs == ["logprobs", "entropy"]
    total, _ = reduce_terms(
        terms(loss, batch, outputs).values(), torch.ones(1, 2), Counts(2, 1, 1), Counts(2, 1, 1)
    )
    assert float(total) == pytest.approx(-1.0 - 0.1 * 3.0)


def test_without_a_bonus_the_entropy_is_reported_and_changes_nothing():
    loss = PolicyLoss(PolicyConfig(), on_policy=True)
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    entropy = torch.tensor([[2.0, 4.0]], requires_grad=True)
    batch = {"loss_mask": torch.tensor([[1.0, 1.0]]), "advantages": torch.tensor([[1.0, 1.0]])}
    found = loss(batch, {"logprobs": logprobs, "entropy": entropy})
    total, tally = reduce_terms(found, batch["loss_mask"], Counts(2, 1, 1), Counts(2, 1, 1))
    total.backward()
    assert tally.metrics()["entropy"] == 3.0 and float(total.detach()) == -1.0
    assert entropy.grad is None


def decoupled_by_hand(new, old, rollout, advantage, low=0.2, high=0.2, most=2.0):
    """AReaL's objective for one token (arXiv:2505.24298, eq. 5), as a loss: its value and its derivative by `new`."""
    weight = min(math.exp(old - rollout), most)
    rho = math.exp(new - old)
    bounded = min(max(rho, 1 - low), 1 + high)
    clipped = bounded * advantage < rho * advantage
    slope = 0.0 if clipped else rho * advantage
    return -weight * min(rho * advantage, bounded * advantage), -weight * slope


# What each token's policies say of it: now, at the step's start, and as it generated.
NEW = [-1.00, -0.40, -2.10, -1.30, -0.75, -3.00]
START = [-1.05, -0.90, -1.90, -1.25, -0.70, -2.80]
ROLLOUT = [-1.20, -0.95, -2.90, -1.00, -0.65, -2.85]
ADVANTAGES = [1.0, 0.5, -0.7, -1.2, 0.3, 2.0]
LAGS = [0, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("old", ["trainer", "rollout", "interpolated"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_decoupled_loss_has_the_gradient_that_is_computed_by_hand(old, updates):
    correction = "none" if old == "rollout" else "truncate"
    config = Corrected(old_logprobs=old, correction=correction, correction_high=2.0)
    loss = PolicyLoss(config, on_policy=updates == 1)
    logprobs = torch.tensor([NEW], dtype=torch.float64, requires_grad=True)
    batch = {
        "loss_mask": torch.ones(1, 6, dtype=torch.float64),
        "advantages": torch.tensor([ADVANTAGES], dtype=torch.float64),
        "rollout_logprobs": torch.tensor([ROLLOUT], dtype=torch.float64),
        "lag": torch.tensor([LAGS], dtype=torch.int8),
        "old_logprobs": torch.tensor([START], dtype=torch.float64),
    }
    declared = {name: batch[name] for name in (*loss.reads, "loss_mask")}
    value = loss(declared, {"logprobs": logprobs, "entropy": torch.zeros(1, 6)})[0].value
    value.sum().backward()

    started = {
        "trainer": NEW if updates == 1 else START,
        "rollout": ROLLOUT,
        # Lags of 0, 1, 2, 3: none, a half, two thirds, three quarters of the way.
        "interpolated": [
            r + share * (n - r)
            for n, r, share in zip(
                NEW, ROLLOUT, [0, 1 / 2, 2 / 3, 3 / 4, 1 / 2, 2 / 3], strict=True
            )
        ],
    }[old]
    most = 1.0 if old == "rollout" else 2.0  # old/rollout is 1 there, and not corrected
    by_hand = [
        decoupled_by_hand(n, o, r, a, most=most)
        for n, o, r, a in zip(NEW, started, ROLLOUT, ADVANTAGES, strict=True)
    ]
    assert value[0].tolist() == pytest.approx([v for v, _ in by_hand], abs=1e-9)
    assert logprobs.grad[0].tolist() == pytest.approx([slope for _, slope in by_hand], abs=1e-9)
    assert len(loss.reads) == len(set(loss.reads))


def test_the_correction_for_the_engine_multiplies_the_loss():
    batch = dict(
        old_logprobs=[[-1.0, -1.0]], advantages=[[1.0, 1.0]], rollout_logprobs=[[-1.5, -3.0]]
    )
    for mode, weights in (("truncate", [math.exp(0.5), 2.0]), ("mask", [math.exp(0.5), 0.0])):
        loss = PolicyLoss(Corrected(correction=mode, correction_high=2.0))
        assert "rollout_logprobs" in loss.reads
        value = terms(loss, batch, dict(logprobs=[[-1.0, -1.0]]))["policy_loss"].value
        assert value[0].tolist() == pytest.approx([-w for w in weights], rel=1e-5)


@pytest.mark.parametrize(("kind", "kl"), [("k3", math.exp(-0.5) - 1 + 0.5), ("k2", 0.125)])
def test_the_kl_term_is_the_estimate_computed_by_hand(kind, kl):
    loss = PolicyLoss(PolicyConfig(), on_policy=True, kl_coef=0.2, kl_kind=kind)
    assert loss.reads == ["advantages", "ref_logprobs"]
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    batch = {
        "loss_mask": torch.ones(1, 1),
        "advantages": torch.zeros(1, 1),
        "ref_logprobs": torch.tensor([[-1.5]]),
    }
    found = loss(batch, {"logprobs": logprobs, "entropy": torch.ones(1, 1)})
    total, _ = reduce_terms(found, batch["loss_mask"], Counts(1, 1, 1), Counts(1, 1, 1))
    assert float(total.detach()) == pytest.approx(0.2 * kl, rel=1e-5)
    total.backward()
    slope = 1 - math.exp(-0.5) if kind == "k3" else 0.5  # d/dx of exp(-d) - 1 + d, and of d^2 / 2
    assert float(logprobs.grad) == pytest.approx(0.2 * slope, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "expected"),
    # rows of 1 and 3 tokens with loss 4 and 1, 2, 3 per token; the constant is 5
    [
        ("token-mean", 10 / 4),
        ("seq-mean-token-mean", (4 + 2) / 2),
        ("seq-mean-token-sum", (4 + 6) / 2),
        ("seq-mean-token-sum-norm", (4 + 6) / 5 / 2),
    ],
)
def test_every_term_of_the_policy_loss_has_the_chosen_mean(how, expected):
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    values = torch.tensor([[4.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    config = ClippedConfig(how=how, length=5, entropy_coef=0.5)
    loss = PolicyLoss(config, on_policy=True, kl_coef=0.25, kl_kind="abs")
    batch = {"loss_mask": mask, "advantages": -values, "ref_logprobs": -1.0 - values}
    outputs = {"logprobs": torch.full((2, 3), -1.0), "entropy": values}
    total, _ = reduce_terms(loss(batch, outputs), mask, Counts(4, 2, 2), Counts(4, 2, 2))
    assert float(total) == pytest.approx(expected * (1 - 0.5 + 0.25))


def test_on_policy_the_ratio_is_that_of_this_forward_and_its_gradient_is_not_lost():
    loss = PolicyLoss(PolicyConfig(), on_policy=True)
    assert loss.reads == ["advantages"]
    logprobs = torch.tensor([[-1.0, -5.0]], requires_grad=True)
    batch = {"loss_mask": torch.ones(1, 2), "advantages": torch.tensor([[2.0, -3.0]])}
    value = loss(batch, {"logprobs": logprobs, "entropy": torch.ones(1, 2)})[0].value
    assert value.tolist() == [[-2.0, 3.0]]
    value.sum().backward()
    assert logprobs.grad.tolist() == [[-2.0, 3.0]]  # of -A rho with rho = 1


@pytest.mark.parametrize(
    ("cls", "setting", "value"),
    [
        (PolicyConfig, "clip_low", 0.0),
        (PolicyConfig, "epochs", 0),
        (ClippedConfig, "dual_clip", 1.0),
        (AggregationConfig, "how", "mean"),
        (CorrectionConfig, "correction", "clip"),
        (CorrectionConfig, "old_logprobs", "engine"),
        (KLConfig, "kl_kind", "k4"),
        (KLConfig, "kl_in", "both"),
        (PretrainConfig, "pretrain_coef", -0.1),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(cls, setting, value):
    with pytest.raises(ValueError, match=setting):
        cls(**{setting: value})
