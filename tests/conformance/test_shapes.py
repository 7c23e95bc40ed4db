"""The contracts carry shapes that no algorithm of ours has: small algorithms, run for real, with a number checked by hand."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.steps import column

from hybridflow.algorithms.sft import NextTokenLoss
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.role import Role
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.kit.testing import AlgorithmConformance, TinyRun
from hybridflow.kit.testing.runs import MODEL

# Distillation: a frozen teacher's most likely tokens


class TeacherLoss(Loss):
    """KL(teacher || student) over the teacher's k most likely tokens, per token."""

    reads, needs = ("topk_ids", "topk_logprobs"), ("topk_logprobs",)

    def __call__(self, batch, outputs):
        teacher, student = batch["topk_logprobs"], outputs["topk_logprobs"]
        assert batch["topk_ids"].shape == student.shape == teacher.shape
        return Term("kl", (teacher.exp() * (teacher - student)).sum(-1))


@attrs.frozen
class DistillConfig:
    """On-policy distillation from the top k of a teacher."""

    prompts_per_step: int = 8
    k: int = 5


class Distill(Algorithm):
    Config = DistillConfig

    def roles(self):
        return (Role("actor", trained=True, generates=True), Role("teacher"))

    def losses(self):
        return {"actor": TeacherLoss()}

    def step(self, ctx):
        batch = ctx.actor.generate(ctx.prompts(self.config.prompts_per_step))
        self.batch = batch = batch.join(ctx.teacher.logprobs(batch, topk=self.config.k))
        ctx.actor.update((batch, self.losses()["actor"]))


class TestDistillation(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return Distill(DistillConfig())

    def tables(self):
        return {
            "teacher": {"model": {"config": MODEL, "init_seed": 7}},
            "actor": {"optimizer": {"lr": 1e-2}},
        }

    def test_the_student_comes_nearer_to_its_teacher(self, algorithm):
        with TinyRun(algorithm, self.tables()) as run:
            metrics = [run.step() for _ in range(6)]
            batch = run.algorithm.batch
            ids, teacher = column(batch, "topk_ids"), column(batch, "topk_logprobs")
            assert ids.shape[-1] == 5 and ids.dtype == torch.int64
            mass = teacher.exp().sum(-1)[column(batch, "loss_mask").bool()]
            assert (mass > 0.3).all() and (mass <= 1 + 1e-5).all()
        assert metrics[-1]["actor/kl"] < metrics[0]["actor/kl"]

    def test_a_teacher_of_the_students_weights_has_nothing_to_say(self):
        with TinyRun(
            Distill(DistillConfig(k=16))
        ) as run:  # all 16 tokens of the vocabulary; the model is the actor's
            metrics = run.step()
        assert metrics["actor/kl"] == pytest.approx(0.0, abs=1e-5)
        assert metrics["actor/grad_norm"] == pytest.approx(0.0, abs=1e-5)


# Masks with holes: tool output inside a response


@attrs.frozen
class ToolConfig:
    """Tokens of a tool stand inside the responses."""

    prompts_per_step: int = 8
    poison: bool = False


class HoleLoss(NextTokenLoss):
    reads = ("advantages",)

    def __call__(self, batch, outputs):
        return Term("policy_loss", -outputs["logprobs"] * batch["advantages"])


class ToolUse(Algorithm):
    """Every token with id 6 to 9 is taken for a tool's; `poison`: with a nan for its advantage."""

    Config = ToolConfig

    def roles(self):
        return (Role("actor", trained=True, generates=True), Role("reward", "reward"))

    def losses(self):
        return {"actor": HoleLoss()}

    def step(self, ctx):
        batch = ctx.actor.generate(ctx.prompts(self.config.prompts_per_step))
        batch = batch.join(ctx.reward.score(batch))
        self.batch = batch = batch.join(ctx.compute(self.mask, batch))
        ctx.actor.update((batch, self.losses()["actor"]))

    def mask(self, response_ids, scores, loss_mask):
        mask = loss_mask * ~((response_ids >= 6) & (response_ids <= 9))
        advantages = (scores[:, None] + 0.5).expand_as(mask).clone()
        if self.config.poison:
            advantages[mask == 0] = float("nan")
        return {
            "loss_mask": mask,
            "advantages": advantages,
            "holes": float((loss_mask - mask).sum()),
        }


class TestMaskWithHoles(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return ToolUse(ToolConfig())

    def test_what_a_tool_said_is_not_trained_on(self):
        found = []
        for poison in (False, True):
            with TinyRun(ToolUse(ToolConfig(poison=poison))) as run:
                first = run.step()
                batch, checksum = run.algorithm.batch, run.checksums()
                mask, logprobs = column(batch, "loss_mask"), column(batch, "rollout_logprobs")
                advantages = column(batch, "advantages").nan_to_num()
            assert first["holes"] > 0
            by_hand = float((-(logprobs * advantages) * mask).sum() / mask.sum())
            assert first["actor/policy_loss"] == pytest.approx(by_hand, rel=1e-3)
            found.append(checksum)
        assert found[0] == found[1], "a nan under the mask reached the weights"

    def test_rows_without_any_token_of_the_policy_leave_the_mean(self):
        with TinyRun(ToolUse(ToolConfig())) as run:
            batch = run.ctx.actor.generate(run.ctx.prompts(8))
            batch = batch.join(run.ctx.reward.score(batch))
            batch = batch.join(run.ctx.compute(run.algorithm.mask, batch))
            whole = run.ctx.actor.loss(batch, HoleLoss()).result()["loss"]
            silent = batch.with_columns(
                loss_mask=tokens([torch.zeros(len(m)) for m in batch["loss_mask"]])
            )
            both = Batch.concat([batch.select(SEEN), silent.select(SEEN)])
            again = run.ctx.actor.loss(both, HoleLoss()).result()["loss"]
            run.ctx.finish()
        assert again == pytest.approx(whole, rel=1e-5)


SEEN = ("prompt_ids", "response_ids", "loss_mask", "advantages")
