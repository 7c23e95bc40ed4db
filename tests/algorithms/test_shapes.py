"""The contracts carry the algorithms that come later: one small algorithm for each shape, run for real, with a number
checked by hand."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.policy import PolicyConfig, PolicyLoss
from hybridflow.algorithms.ppo import ValueLoss
from hybridflow.algorithms.sft import NextTokenLoss
from hybridflow.core.algorithm import Algorithm, Role
from hybridflow.core.batch import Batch
from hybridflow.core.columns import tokens
from hybridflow.core.loss import Loss, Term
from hybridflow.core.testing import AlgorithmConformance, TinyRun
from hybridflow.core.testing.runs import MODEL


def column(batch: Batch, name: str) -> torch.Tensor:
    """Padded, on this process."""
    found = batch[name]
    return found.padded() if found.lengths is not None else torch.as_tensor(found.values)


# DPO: pairs


@attrs.frozen
class DPOConfig:
    """Direct preference optimisation (arXiv:2305.18290)."""

    pairs_per_step: int = 4
    beta: float = 0.5


class DPOLoss(Loss):
    reads, unit = ("ref_logprobs", "preferred", "pair"), "pair"

    def __init__(self, beta: float):
        self.beta = beta

    def __call__(self, batch, outputs):
        mask = batch["loss_mask"]
        policy, ref = (outputs["logprobs"] * mask).sum(-1), (batch["ref_logprobs"] * mask).sum(-1)
        assert (batch["pair"][::2] == batch["pair"][1::2]).all(), "a pair was split"
        best = batch["preferred"].bool()
        value = F.dpo_loss(policy[best], policy[~best], ref[best], ref[~best], self.beta)
        right = ((policy - ref)[best] > (policy - ref)[~best]).float()
        return [Term("dpo_loss", value, how="unit-mean"), Term("accuracy", right, how="unit-mean", weight=0.0)]


class DPO(Algorithm):
    Config = DPOConfig
    data_columns = ("response_ids",)

    def roles(self):
        return (Role("actor", trained=True), Role("ref"))

    def losses(self):
        return {"actor": DPOLoss(self.config.beta)}

    def step(self, ctx):
        batch = ctx.prompts(self.config.pairs_per_step)
        self.batch = batch = batch.join(ctx.ref.logprobs(batch))
        ctx.actor.update((batch, self.losses()["actor"]))


PAIRS = {
    "data": {
        "source": "tests.algorithms.pair_rows:RightAndWrong",
        "answer": "{chosen}",
        "response": "{chosen}",
        "rejected": "{rejected}",
    },
    "actor": {"micro_batch_tokens": 30, "optimizer": {"lr": 3e-3}},
}


class TestDPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return DPO(DPOConfig())

    def tables(self):
        return PAIRS

    def test_it_begins_at_log_two_and_prefers_the_chosen_ones(self, algorithm):
        with TinyRun(algorithm, PAIRS) as run:
            metrics = [run.step() for _ in range(24)]
        assert metrics[0]["actor/dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference
        assert sum(m["actor/accuracy"] for m in metrics[-8:]) / 8 > 0.65
        assert sum(m["actor/dpo_loss"] for m in metrics[-8:]) / 8 < 0.69

    def test_the_second_loss_is_that_of_the_weights(self, algorithm):
        with TinyRun(algorithm, PAIRS) as run:
            run.step()
            old = run.ctx.actor  # the loss of step 2 is taken before its update, by the weights after step 1
            batch = run.ctx.prompts(4)
            ref, policy = run.ctx.ref.logprobs(batch), old.logprobs(batch)
            kept = [column(b, n) for b, n in ((ref, "ref_logprobs"), (policy, "old_logprobs"), (batch, "preferred"))]
            loss = run.ctx.actor.loss(batch.join(ref), DPOLoss(0.5)).result()["loss"]
            run.ctx.finish()
        ref_sum, policy_sum, best = kept[0].sum(-1), kept[1].sum(-1), kept[2].bool()
        gain = (policy_sum - ref_sum)[best] - (policy_sum - ref_sum)[~best]
        assert loss == pytest.approx(float(-torch.nn.functional.logsigmoid(0.5 * gain).mean()), rel=1e-4)


# Safe RLHF: two critics, a multiplier, and pretraining text in the same optimizer step


@attrs.frozen
class SafeConfig(PolicyConfig):
    """Safe RLHF (arXiv:2310.12773)."""

    prompts_per_step: int = 8
    text_coef: float = 0.3
    cost_limit: float = 0.2


class TextLoss(Loss):
    """The pretraining text's next-token loss."""

    def __init__(self, weight: float):
        self.weight = weight

    def __call__(self, batch, outputs):
        return Term("text_loss", -outputs["logprobs"], weight=self.weight)


class CostValueLoss(Loss):
    reads, needs = ("cost_values", "cost_returns"), ("values",)

    def __call__(self, batch, outputs):
        return Term(
            "value_loss", F.value_loss(outputs["values"], None, batch["cost_returns"], None) + 0 * batch["cost_values"]
        )


class SafeRLHF(Algorithm):
    Config = SafeConfig
    data_columns = ("response_ids",)

    def __init__(self, config):
        super().__init__(config)
        self.multiplier = F.LagrangeMultiplier(init=1.0, lr=0.5, limit=config.cost_limit, maximum=10.0, window=64)

    def roles(self):
        critics = (Role("critic", "value", trained=True), Role("cost_critic", "value", trained=True))
        return (Role("actor", trained=True, generates=True), *critics, Role("reward", "reward"), Role("cost", "reward"))

    def losses(self):
        return {
            "actor": PolicyLoss(self.config, "token-mean"),
            "critic": ValueLoss(None),
            "cost_critic": CostValueLoss(),
        }

    def step(self, ctx):
        c, losses = self.config, self.losses()
        text = ctx.prompts(c.prompts_per_step)
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step))
        batch = batch.join(ctx.reward.score(batch), ctx.cost.score(batch), ctx.actor.logprobs(batch))
        batch = batch.join(ctx.critic.values(batch), ctx.cost_critic.values(batch))
        batch = batch.join(ctx.compute(self.advantages, batch))
        ctx.actor.update([(batch, losses["actor"]), (text, TextLoss(c.text_coef))])
        ctx.critic.update((batch, losses["critic"]))
        ctx.cost_critic.update((batch, losses["cost_critic"]))
        self.batch = batch
        self.multiplier.update(column(batch, "costs"))

    def advantages(self, scores, costs, values, cost_values, loss_mask):
        zero, lam = torch.zeros_like(values), self.multiplier.value
        reward, returns = F.gae(F.token_rewards(scores, zero, loss_mask, 0.0), values, loss_mask, 1.0, 0.95)
        cost, cost_returns = F.gae(F.token_rewards(costs, zero, loss_mask, 0.0), cost_values, loss_mask, 1.0, 0.95)
        return {
            "advantages": (reward - lam * cost) / (1 + lam),
            "returns": returns,
            "cost_returns": cost_returns,
            "lam": lam,
        }

    def state_dict(self):
        return {"multiplier": self.multiplier.state_dict()}

    def load_state_dict(self, state):
        self.multiplier.load_state_dict(state["multiplier"])


COSTS = {"cost": {"function": "hybridflow.core.testing.runs:even_tokens"}}


class TestSafeRLHF(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return SafeRLHF(SafeConfig())

    def tables(self):
        return COSTS

    def test_the_multiplier_rises_with_the_costs_as_computed_by_hand(self, algorithm):
        with TinyRun(algorithm, COSTS) as run:
            run.step()
            costs = column(run.algorithm.batch, "costs").double()
            assert run.algorithm.multiplier.value == pytest.approx(
                math.exp(0.5 * (float(costs.mean()) - 0.2)), rel=1e-5
            )
            assert run.step()["lam"] == pytest.approx(math.exp(0.5 * (float(costs.mean()) - 0.2)), rel=1e-5)

    def test_one_optimizer_step_has_the_loss_of_both_batches(self, algorithm):
        with TinyRun(algorithm, COSTS) as run:
            metrics = run.step()
            assert run.worker("actor").backend.version == 1
        both = metrics["actor/policy_loss"] + 0.3 * metrics["actor/text_loss"]
        assert metrics["actor/loss"] == pytest.approx(both, rel=1e-4)

    def test_the_two_critics_learn_from_their_own_scores(self, algorithm):
        with TinyRun(algorithm, COSTS) as run:
            run.step()
            batch = run.algorithm.batch
            assert run.weights("critic")["score.weight"].shape == (1, 32)
            for scores, returns in (("scores", "returns"), ("costs", "cost_returns")):
                # at gamma 1 and lambda 0.95 the last token's return is the score itself
                ends = np.asarray(batch[returns].lengths) - 1
                last = column(batch, returns)[torch.arange(batch.rows), torch.from_numpy(ends)]
                torch.testing.assert_close(last, column(batch, scores), atol=1e-5, rtol=0)


# DAPO: draw until the batch is full


@attrs.frozen
class DAPOConfig(PolicyConfig):
    """Dynamic sampling (arXiv:2503.14476)."""

    groups_per_step: int = 4
    group_size: int = 4
    prompts_per_draw: int = 3
    draws: int = 6


class DAPO(Algorithm):
    """Groups of equal scores are left out and more prompts drawn; what is too much waits for the next step."""

    Config = DAPOConfig

    def __init__(self, config):
        super().__init__(config)
        self.waiting: list[dict] = []

    def roles(self):
        return (Role("actor", trained=True, generates=True), Role("reward", "reward"))

    def losses(self):
        return {"actor": PolicyLoss(self.config, "token-mean")}

    def step(self, ctx):
        c, parts = self.config, [rows_to_batch(self.waiting)] if self.waiting else []
        rows, draws = len(self.waiting), 0
        while rows < c.groups_per_step * c.group_size and draws < c.draws:
            drawn = ctx.actor.generate(ctx.prompts(c.prompts_per_draw).repeat(c.group_size))
            drawn = drawn.join(ctx.reward.score(drawn), ctx.actor.logprobs(drawn))
            scores = column(drawn, "scores").view(-1, c.group_size)
            keep = (scores.amax(1) > scores.amin(1)).repeat_interleave(c.group_size).numpy()
            parts.append(drawn.take(keep).select(KEPT))
            rows, draws = rows + int(keep.sum()), draws + 1
        batch = Batch.concat(parts)
        full = c.groups_per_step * c.group_size
        self.waiting = batch_to_rows(batch.take(slice(full, None)))
        batch = batch.take(slice(0, full))
        self.batch = batch = batch.join(ctx.compute(self.advantages, batch))
        ctx.actor.update((batch, self.losses()["actor"]))
        ctx.log(draws=draws)

    def advantages(self, scores, group, loss_mask):
        return {"advantages": F.group_normalized(scores, group)[:, None] * loss_mask}

    def state_dict(self):
        return {"waiting": self.waiting}

    def load_state_dict(self, state):
        self.waiting = state["waiting"]


KEPT = ("prompt_ids", "response_ids", "loss_mask", "old_logprobs", "scores", "group")


def batch_to_rows(batch: Batch) -> list[dict]:
    columns = {name: [value.tolist() for value in batch[name]] for name in KEPT} if batch.rows else {}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def rows_to_batch(rows: list[dict]) -> Batch:
    per_row = {"scores": torch.float32, "group": torch.int64}
    kinds = {"old_logprobs": torch.float32, "loss_mask": torch.uint8}
    columns = {n: tokens([r[n] for r in rows], kinds.get(n, torch.int64)) for n in KEPT if n not in per_row}
    return Batch(columns | {n: torch.tensor([r[n] for r in rows], dtype=d) for n, d in per_row.items()})


class TestDAPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return DAPO(DAPOConfig())

    def test_every_step_has_a_full_batch_of_groups_that_differ(self, algorithm):
        waited, draws = [], []
        with TinyRun(algorithm) as run:
            for _ in range(3):
                draws.append(run.step()["draws"])
                waited.append(len(run.algorithm.waiting))
                scores = column(run.algorithm.batch, "scores").view(-1, 4)
                assert run.algorithm.batch.rows == 16 and draws[-1] <= 6
                assert (scores.amax(1) > scores.amin(1)).all()
                groups = column(run.algorithm.batch, "group").view(-1, 4)
                assert (groups == groups[:, :1]).all() and len(groups[:, 0].unique()) == 4
        assert any(waited) and max(draws) > 1, "the test needs leftovers, and a step that draws again"
        assert all(n % 4 == 0 for n in waited)

    def test_what_waits_survives_json_and_comes_first(self, algorithm):
        with TinyRun(algorithm) as run:
            while not run.algorithm.waiting:
                run.step()
            waiting = run.algorithm.waiting
            run.step()
            first = batch_to_rows(run.algorithm.batch.take(slice(0, len(waiting))))
        assert [r["response_ids"] for r in first] == [r["response_ids"] for r in waiting]


# GSPO: one ratio per sequence


class SequenceLoss(Loss):
    reads = ("advantages", "old_logprobs")

    def __call__(self, batch, outputs):
        old, mask = batch["old_logprobs"], batch["loss_mask"]
        value = F.sequence_ratio_loss(outputs["logprobs"], old, batch["advantages"], mask, 0.01, 0.02)
        return Term("policy_loss", value, how="seq-mean-token-mean")


@attrs.frozen
class GSPOConfig:
    """Group sequence policy optimisation (arXiv:2507.18071)."""

    prompts_per_step: int = 4
    group_size: int = 4


class GSPO(Algorithm):
    Config = GSPOConfig

    def roles(self):
        return (Role("actor", trained=True, generates=True), Role("reward", "reward"))

    def losses(self):
        return {"actor": SequenceLoss()}

    def step(self, ctx):
        c = self.config
        batch = ctx.actor.generate(ctx.prompts(c.prompts_per_step).repeat(c.group_size))
        batch = batch.join(ctx.reward.score(batch), ctx.actor.logprobs(batch))
        self.batch = batch = batch.join(ctx.compute(self.advantages, batch))
        for mini in ctx.minibatches(batch, batch.rows, epochs=2):
            ctx.actor.update((mini, self.losses()["actor"]))

    def advantages(self, scores, group, loss_mask):
        return {"advantages": F.group_normalized(scores, group)[:, None] * loss_mask}


class TestGSPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return GSPO(GSPOConfig())

    def test_the_loss_is_that_of_sequences_computed_one_by_one(self, algorithm):
        with TinyRun(algorithm, {"actor": {"micro_batch_tokens": 40}}) as run:
            run.step()
            batch = run.algorithm.batch
            loss = run.ctx.actor.loss(batch, SequenceLoss()).result()["loss"]
            now = run.ctx.actor.logprobs(batch)
            new, old = list(now["old_logprobs"]), list(batch["old_logprobs"])
            advantages = [a[0].item() for a in batch["advantages"]]
            run.ctx.finish()
        expected = 0.0
        for n, o, a in zip(new, old, advantages, strict=True):
            ratio = math.exp(float((n.double() - o.double()).mean()))
            expected += max(-ratio * a, -min(max(ratio, 0.99), 1.02) * a) / len(new)
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)


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
        return {"teacher": {"model": {"config": MODEL, "init_seed": 7}}, "actor": {"optimizer": {"lr": 1e-2}}}

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
        with TinyRun(Distill(DistillConfig(k=16))) as run:  # all 16 tokens of the vocabulary; the model is the actor's
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
        return {"loss_mask": mask, "advantages": advantages, "holes": float((loss_mask - mask).sum())}


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
            silent = batch.with_columns(loss_mask=tokens([torch.zeros(len(m)) for m in batch["loss_mask"]]))
            both = Batch.concat([batch.select(SEEN), silent.select(SEEN)])
            again = run.ctx.actor.loss(both, HoleLoss()).result()["loss"]
            run.ctx.finish()
        assert again == pytest.approx(whole, rel=1e-5)


SEEN = ("prompt_ids", "response_ids", "loss_mask", "advantages")
