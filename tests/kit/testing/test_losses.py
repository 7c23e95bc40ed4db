"""Every invariant of LossConformance notices the fault that it is for, and good losses pass."""

from __future__ import annotations

import pytest
import torch
from helpers.expect import caught, each_fault, each_invariant

from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.kit.testing import LossConformance

SPLIT = "test_the_split_into_micro_batches_and_ranks_changes_nothing"


def passes(method: str, loss: Loss) -> None:
    getattr(LossConformance(), method)({"actor": loss})


class Good(Loss):
    reads = ("advantages", "old_logprobs")

    def __call__(self, batch, outputs):
        ratio = (outputs["logprobs"] - batch["old_logprobs"]).clamp(-20, 20).exp()
        return [
            Term("policy", -ratio * batch["advantages"]),
            Term("ratio", ratio.detach(), weight=0.0),
        ]


class LocalMean(Loss):
    """The classic: a mean over the micro-batch's own tokens, in a shape that the core accepts."""

    def __call__(self, batch, outputs):
        mask = batch["loss_mask"]
        mean = -(outputs["logprobs"] * mask).sum() / mask.sum()
        return Term("nll", mean[None], how="unit-mean")


class DividesByItsOwnTokens(Loss):
    def __call__(self, batch, outputs):
        mask = batch["loss_mask"]
        return Term("nll", -outputs["logprobs"] / mask.sum())


class PlainMean(Loss):
    """value.mean(), padding and all."""

    def __call__(self, batch, outputs):
        rows = len(outputs["logprobs"])
        return Term("nll", -outputs["logprobs"].mean().expand(rows), how="unit-mean")


class WhitensItsMicroBatch(Loss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        a = batch["advantages"]
        return Term("policy", -outputs["logprobs"] * (a - a.mean()) / (a.std() + 1))


class PairsWithoutAUnit(Loss):
    """Compares neighbouring rows, and does not say that they belong together."""

    needs = ("scores",)

    def __call__(self, batch, outputs):
        s = outputs["scores"]
        return Term("pairs", -torch.nn.functional.logsigmoid(s - s.roll(1)), how="unit-mean")


class IgnoresTheMask(Loss):
    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"], mask=torch.ones_like(batch["loss_mask"]))


class SumsHiddenTokens(Loss):
    """A sequence's log-probability with tool output in it."""

    reads = ("advantages",)

    def __call__(self, batch, outputs):
        whole = outputs["logprobs"].sum(-1, keepdim=True)
        return Term("policy", -whole * batch["advantages"] / 10)


class DependsOnTheWidth(Loss):
    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"] / outputs["logprobs"].shape[1])


class ReadsMore(Loss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return Term("policy", -(outputs["logprobs"] - batch["ref_logprobs"]) * batch["advantages"])


class LooksForMore(Loss):
    """An optional column is never there in a run."""

    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"] - batch.get("ref_logprobs", 0))


class NeedsMore(Loss):
    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"] - 0.01 * outputs["entropy"])


class ReadsLess(Loss):
    reads = ("advantages", "returns")

    def __call__(self, batch, outputs):
        return Term("policy", -outputs["logprobs"] * batch["advantages"])


class EntropyInside(Loss):
    reads = ("advantages",)
    needs = ("logprobs", "entropy")

    def __call__(self, batch, outputs):
        policy = -outputs["logprobs"] * batch["advantages"]
        return Term("policy", policy - 0.01 * outputs["entropy"])


class ShiftedAdvantages(Loss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return Term("policy", -outputs["logprobs"] * (batch["advantages"] - 0.1))


class UnclampedRatio(Loss):
    reads = ("advantages", "old_logprobs")

    def __call__(self, batch, outputs):
        ratio = (outputs["logprobs"] - batch["old_logprobs"]).exp()
        return Term("policy", -ratio * batch["advantages"])


class Remembers(Loss):
    calls = 0

    def __call__(self, batch, outputs):
        self.calls += 1
        return Term("nll", -outputs["logprobs"] * self.calls)


class WritesIntoItsBatch(Loss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return Term("policy", -outputs["logprobs"] * batch["advantages"].clamp_(-0.1, 0.1))


FAULTS = {
    SPLIT: [
        LocalMean(),
        DividesByItsOwnTokens(),
        PlainMean(),
        WhitensItsMicroBatch(),
        PairsWithoutAUnit(),
    ],
    "test_what_the_mask_hides_changes_nothing": [IgnoresTheMask(), SumsHiddenTokens()],
    "test_padding_changes_nothing": [PlainMean(), DependsOnTheWidth()],
    "test_only_declared_columns_are_read": [ReadsMore(), LooksForMore(), NeedsMore(), ReadsLess()],
    "test_zero_advantages_give_no_policy_gradient": [EntropyInside(), ShiftedAdvantages()],
    "test_gradients_are_finite_however_far_the_policy_has_moved": [UnclampedRatio()],
    "test_it_is_a_function_of_its_arguments": [Remembers(), WritesIntoItsBatch()],
}


@each_fault(LossConformance, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught(LossConformance, method, losses={"actor": fault})


@each_invariant(LossConformance)
def test_a_good_loss_passes(method):
    passes(method, Good())


def test_an_unknown_column_says_what_to_override():
    class Unknown(Loss):
        reads = ("confidence",)

        def __call__(self, batch, outputs):
            return Term("nll", -outputs["logprobs"] * batch["confidence"])

    with pytest.raises(LookupError, match="override columns"):
        passes(SPLIT, Unknown())

    class Kit(LossConformance):
        def columns(self, name, shape):
            if name == "confidence":
                return shape.per_row(0.0, 1.0)[:, None]
            return super().columns(name, shape)

    Kit().test_the_split_into_micro_batches_and_ranks_changes_nothing({"actor": Unknown()})
