"""The contract of training backends: the learning rate, and what may be asked of a model."""

from __future__ import annotations

import pytest

from hybridflow.core.contracts.training import OptimizerConfig, check_needs
from hybridflow.core.errors import HybridFlowError


@pytest.mark.parametrize(
    ("config", "by_hand"),
    [
        (OptimizerConfig(lr=4.0), [4.0, 4.0, 4.0]),
        (OptimizerConfig(lr=4.0, warmup_steps=4), [1.0, 2.0, 3.0, 4.0, 4.0]),
        (OptimizerConfig(lr=4.0, schedule="linear", total_steps=4), [4.0, 3.0, 2.0, 1.0, 0.0, 0.0]),
        (
            OptimizerConfig(lr=4.0, schedule="linear", total_steps=6, warmup_steps=2, min_lr_ratio=0.5),
            [2.0, 4.0, 4.0, 3.5, 3.0, 2.5, 2.0, 2.0],
        ),
        (
            OptimizerConfig(lr=4.0, schedule="cosine", total_steps=5, warmup_steps=1),
            [4.0, 4.0, 2 + 2 * 0.5**0.5, 2.0, 2 - 2 * 0.5**0.5, 0.0, 0.0],
        ),
        (OptimizerConfig(lr=4.0, schedule="cosine", total_steps=2, min_lr_ratio=0.25), [4.0, 2.5, 1.0, 1.0]),
    ],
    ids=["constant", "warm-up", "linear", "linear-floor", "cosine", "cosine-floor"],
)
def test_learning_rates_are_those_worked_out_by_hand(config, by_hand):
    assert [config.lr_at(step) for step in range(len(by_hand))] == pytest.approx(by_hand, abs=1e-12)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="greater than 0, got -1"):
        OptimizerConfig(lr=-1)
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        OptimizerConfig(min_lr_ratio=2)
    with pytest.raises(ValueError, match="needs total_steps > warmup_steps, got 5 and 5"):
        OptimizerConfig(schedule="cosine", total_steps=5, warmup_steps=5)


def test_a_model_is_asked_only_for_what_its_kind_has():
    check_needs("policy", ["logprobs", "entropy", "topk_logprobs", "topk:5"])
    check_needs("value", ["values"])
    check_needs("score", ["scores"])
    for kind, need in (("policy", "values"), ("value", "logprobs"), ("score", "topk:2"), ("policy", "logprob")):
        with pytest.raises(HybridFlowError, match=f"a {kind} model has no output '{need}'; it has "):
            check_needs(kind, [need])
