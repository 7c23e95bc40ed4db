"""What the policy-gradient algorithms share beside their steps: sizes, roles, the text beside a mini-batch, what is refused."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
import torch

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.errors import ConfigError
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import TABLES

SMALL = GRPOConfig(prompts_per_step=4, group_size=4)
WITH_TEXT = attrs.evolve(SMALL, pretrain_coef=0.3, pretrain_batch_size=4)


class WithItsOwnForward(GRPO):
    """GRPO that asks for old_logprobs although there is one update."""

    on_policy = False


def test_old_logprobs_are_needed_only_with_several_updates():
    several = (dict(epochs=2), dict(mini_batch_size=8))
    assert GRPO(SMALL).on_policy and "old_logprobs" not in GRPO(SMALL).losses()["actor"].reads
    for settings in several:
        algorithm = GRPO(attrs.evolve(SMALL, **settings))
        assert not algorithm.on_policy and algorithm.updates_per_step() == 2
        assert "old_logprobs" in algorithm.losses()["actor"].reads


class Remembers(PolicyLoss):
    """Keeps what the loss was called with."""

    seen: ClassVar[list] = []

    def old_logprobs(self, batch, logprobs):
        old = super().old_logprobs(batch, logprobs)
        self.seen.append(
            (logprobs, batch["rollout_logprobs"], batch["lag"], batch["loss_mask"], old)
        )
        return old


class RemembersGRPO(GRPO):
    loss = Remembers


@pytest.mark.parametrize("apart", [True, False])
def test_the_old_policy_is_interpolated_by_each_tokens_lag(apart):
    """By the lag of a row, one step ahead, and by that of a token, where responses are carried over."""
    config = attrs.evolve(
        SMALL, mini_batch_size=8, old_logprobs="interpolated", correction="truncate"
    )
    assert not GRPO(config).reads_old_logprobs and GRPO(config).corrects_staleness
    tables = {"run": {"max_staleness": 1 if apart else 2}, "actor": {"optimizer": {"lr": 1e-2}}}
    if apart:
        tables |= {"pools": {"main": [1], "engines": [1]}}
        tables["actor"]["generation"] = {"pool": "engines"}
    Remembers.seen.clear()
    with TinyRun(RemembersGRPO(config), tables) as run:
        steps = run.steps(4)
    assert len(Remembers.seen) == 4 * 2
    lags = set()
    for new, rollout, lag, mask, old in Remembers.seen:
        rows, tokens = mask.nonzero(as_tuple=True)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            steps_behind = int(lag[row] if apart else lag[row, token])
            lags.add(steps_behind)
            n, r = float(new[row, token]), float(rollout[row, token])
            assert float(old[row, token]) == pytest.approx(
                r + (n - r) * steps_behind / (steps_behind + 1), abs=1e-5
            )
    assert lags == ({0, 1} if apart else {0, 1, 2})
    assert max(metrics["actor/staleness_max"] for metrics in steps) == max(lags)


def test_the_ratio_to_the_policy_that_generated_needs_no_pass_and_runs_ahead():
    config = attrs.evolve(SMALL, mini_batch_size=8, old_logprobs="rollout")
    algorithm = GRPO(config)
    assert algorithm.losses()["actor"].reads == ["advantages", "rollout_logprobs"]
    assert algorithm.corrects_staleness and not algorithm.reads_old_logprobs
    with TinyRun(algorithm, {"run": {"max_staleness": 1}}) as run:
        steps = run.steps(3)
    assert max(metrics["actor/staleness_max"] for metrics in steps) == 1


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


@pytest.mark.parametrize(
    ("mini", "epochs", "rows", "updates"),
    [(0, 1, 16, 1), (16, 1, 16, 1), (5, 1, 5, 4), (5, 3, 5, 12), (0, 2, 16, 2)],
)
def test_a_step_of_sixteen_sequences_is_so_many_updates_of_so_many(mini, epochs, rows, updates):
    algorithm = GRPO(attrs.evolve(SMALL, mini_batch_size=mini, epochs=epochs))
    assert algorithm.rows_per_step == 16
    assert (algorithm.rows_per_update, algorithm.updates_per_step()) == (rows, updates)
    assert algorithm.on_policy is (updates == 1)


def test_so_many_updates_are_made():
    with TinyRun(GRPO(attrs.evolve(SMALL, mini_batch_size=5, epochs=2))) as run:
        run.step()
        assert run.worker("actor").backend.version == 8


def test_the_reference_is_a_role_where_the_kl_has_a_weight():
    assert [role.name for role in GRPO(SMALL).roles()] == ["actor", "reward"]
    assert [role.name for role in GRPO(attrs.evolve(SMALL, kl_coef=0.1)).roles()] == [
        "actor",
        "ref",
        "reward",
    ]


def test_the_pretraining_text_is_in_the_same_optimizer_step():
    with TinyRun(GRPO(WITH_TEXT), {"pretrain": TABLES["data"]}) as run:
        metrics = run.step()
        assert run.worker("actor").backend.version == 1
    both = metrics["actor/policy_loss"] + 0.3 * metrics["actor/nll"]
    assert metrics["actor/loss"] == pytest.approx(both, rel=1e-4)
    assert GRPO(SMALL).data_sets == {} and GRPO(WITH_TEXT).data_sets == {
        "pretrain": ("response_ids",)
    }


def test_a_missing_data_set_is_named():
    with pytest.raises(ConfigError, match=r"pretrain: .*give \[pretrain\], as \[data\]"):
        TinyRun(GRPO(WITH_TEXT))
    no_response = {k: v for k, v in TABLES["data"].items() if k != "response"}
    with pytest.raises(ConfigError, match=r"pretrain\.response: "):
        TinyRun(GRPO(WITH_TEXT), {"pretrain": no_response})


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (GRPO(GRPOConfig(how="seq-mean-token-sum-norm")), "needs length"),
        (ReMax(ReMaxConfig(mini_batch_size=65)), "larger than the 64 sequences"),
        (GRPO(attrs.evolve(SMALL, mini_batch_size=17)), "larger than the 16 sequences"),
        (GRPO(GRPOConfig(kl_target=0.1)), "kl_target needs kl_coef"),
        (GRPO(GRPOConfig(old_logprobs="rollout", correction="mask")), 'set correction = "none"'),
        (GRPO(GRPOConfig(old_logprobs="interpolated")), 'set "trainer", or several updates'),
    ],
)
def test_settings_that_contradict_each_other_are_named(algorithm, said):
    [problem] = algorithm.problems(SamplingParams())
    assert said in problem
    assert GRPO(SMALL).problems(SamplingParams()) == []
