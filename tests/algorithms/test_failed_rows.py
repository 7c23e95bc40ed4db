"""Failed rows, with a score of NaN and a mask of zeros: the other rows get what they would get without them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.steps import Watched, close, column

from hybridflow.algorithms import functional as F
from hybridflow.algorithms.dapo import DAPO, DAPOConfig
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.algorithms.reinforce_pp import (
    ReinforcePP,
    ReinforcePPBaseline,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
)
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.algorithms.safe_rlhf import SafeRLHF, SafeRLHFConfig
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import RewardError
from hybridflow.core.running.failures import check_failed
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import tiny_job

NAN = math.nan


@pytest.mark.parametrize(
    ("scores", "plain", "std", "rloo"),
    [
        # None failed. The mean is 3, the sample deviation 2; each less the mean of two others.
        ([1.0, 3.0, 5.0], [-2, 0, 2], [-1, 0, 1], [-3, 0, 3]),
        # One failed. The mean of 1 and 5 is 3, their deviation the root of 8.
        ([1.0, NAN, 5.0], [-2, 0, 2], [-2 / 8**0.5, 0, 2 / 8**0.5], [-4, 0, 4]),
        # All but one failed: nothing to compare with.
        ([NAN, 7.0, NAN], [0, 0, 0], [0, 0, 0], [0, 0, 0]),
        ([NAN, NAN, NAN], [0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_the_mean_of_a_group_is_that_of_its_scores(scores, plain, std, rloo):
    # Between the rows of the group stand those of another one, whose mean is 11.
    rows = torch.tensor([10.0, scores[0], scores[1], 12.0, scores[2]])
    group = torch.tensor([4, 9, 9, 4, 9])

    def beside(own, other):
        return [-other, own[0], own[1], other, own[2]]

    close(F.group_normalized(rows, group, "none"), beside(plain, 1.0))
    close(F.group_normalized(rows, group, "std", eps=1e-9), beside(std, 0.5**0.5))
    close(F.leave_one_out(rows, group), beside(rloo, 2.0))


def test_a_real_group_of_one_keeps_its_score_without_a_baseline():
    close(F.leave_one_out(torch.tensor([7.0, 2.0, NAN]), torch.tensor([0, 1, 1])), [7.0, 0.0, 0.0])


def given(rows: int, seed: int = 0) -> dict:
    """Columns of a batch of rows with four tokens, the last of every other one masked."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, 4)
    mask[::2, 3] = 0
    names = ("old_logprobs", "ref_logprobs", "values", "cost_values")
    return {
        **{name: torch.randn(rows, 4, generator=draw) for name in names},
        **{name: torch.randn(rows, generator=draw) for name in ("scores", "costs", "baseline_scores")},
        "group": torch.arange(rows) // 4,
        "loss_mask": mask,
    }  # fmt: skip


ALGORITHMS = [
    (GRPO(GRPOConfig(kl_coef=0.1, kl_in="reward")), "advantages"),
    (RLOO(RLOOConfig()), "advantages"),
    (DAPO(DAPOConfig(overlong_cache=2)), "advantages"),
    (PPO(PPOConfig()), "advantages"),
    (ReMax(ReMaxConfig()), "advantages"),
    (ReinforcePP(ReinforcePPConfig()), "advantages"),
    (ReinforcePPBaseline(ReinforcePPBaselineConfig()), "advantages"),
    (SafeRLHF(SafeRLHFConfig()), "lagrangian_advantages"),
]
READS = {
    "GRPO": ("group",),
    "RLOO": ("group",),
    "DAPO": ("group",),
    "PPO": ("values",),
    "ReMax": ("baseline_scores",),
    "ReinforcePP": (),
    "ReinforcePPBaseline": ("group",),
    "SafeRLHF": ("costs", "values", "cost_values"),
}


def computed(algorithm, method: str, columns: dict) -> dict:
    names = (
        "scores",
        "loss_mask",
        "old_logprobs",
        "ref_logprobs",
        *READS[type(algorithm).__name__],
    )
    more = {"limit": 4} if isinstance(algorithm, DAPO) else {}
    return getattr(algorithm, method)(**{name: columns[name] for name in names}, **more)


@pytest.mark.parametrize(("algorithm", "method"), ALGORITHMS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("failed", [[], [1], [0, 1, 2, 3], [2, 5, 6]], ids=str)
def test_the_other_rows_get_what_they_would_get_without_the_failed_ones(algorithm, method, failed):
    columns = given(8)
    alone = [row for row in range(8) if row not in failed]
    want = computed(algorithm, method, {name: value[alone] for name, value in columns.items()})

    columns["scores"][failed] = NAN
    columns["loss_mask"][failed] = 0
    found = computed(algorithm, method, columns)
    mask = found.get("loss_mask", columns["loss_mask"])
    assert mask[failed].sum() == 0
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            seen = value.masked_fill(mask == 0, 0)
            assert torch.isfinite(seen).all(), name
            other = want[name].masked_fill(columns["loss_mask"][alone] == 0, 0)
            torch.testing.assert_close(seen[alone], other, rtol=1e-5, atol=1e-6)
        elif name != "baseline":  # the mean of the greedy responses, whatever became of the others
            assert float(value) == pytest.approx(float(want[name]), rel=1e-5), name


@pytest.mark.parametrize(
    ("algorithm", "method", "column"),
    [(*ALGORITHMS[4], "baseline_scores"), (*ALGORITHMS[7], "costs")],
    ids=["ReMax", "SafeRLHF"],
)
def test_a_row_without_its_baseline_or_its_cost_is_left_out_too(algorithm, method, column):
    columns = given(8)
    columns[column][3] = NAN
    found = computed(algorithm, method, columns)
    assert found["loss_mask"].sum(1).tolist() == [3, 4, 3, 0, 3, 4, 3, 4]
    assert not found["advantages"][3].any() and torch.isfinite(found["advantages"]).all()


def test_dapo_keeps_groups_whose_scores_differ_apart_from_failed_ones():
    algorithm = DAPO(DAPOConfig(group_size=3))
    scores = torch.tensor([1.0, NAN, 0.0, 1.0, NAN, 1.0, NAN, NAN, NAN, 1.0, NAN, NAN])
    assert algorithm.unequal(Batch({"scores": scores})).tolist() == [True] * 3 + [False] * 9


def some_fail(sample: RewardSample) -> float:
    """The share of even tokens; a response that begins with an odd token cannot be scored."""
    if len(sample.response_ids) and sample.response_ids[0] % 2:
        raise OSError("no judge")
    return float((sample.response_ids % 2 == 0).mean())


MASKED = {
    "function": "tests.algorithms.test_failed_rows:some_fail",
    "on_failure": {"mask": True, "max_failed": 0.9},
}


class KeptGRPO(Watched, GRPO):
    pass


class KeptSafe(Watched, SafeRLHF):
    pass


def test_a_step_leaves_failed_rows_out_and_says_how_many():
    with TinyRun(KeptGRPO(GRPOConfig(prompts_per_step=8, group_size=4)), {"reward": MASKED}) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    scores, mask = column(batch, "scores"), column(batch, "loss_mask")
    failed = scores.isnan()
    assert 0 < failed.sum() < 32
    assert batch["outcome"].values == [
        "failed_reward" if gone else "complete" if reason == "stop" else "truncated_tokens"
        for gone, reason in zip(failed, batch["finish_reason"].values, strict=True)
    ]
    assert not mask[failed].any() and mask[~failed].any(1).all()
    assert metrics["reward/some_fail_failed"] == pytest.approx(float(failed.float().mean()))
    assert metrics["reward/scores"] == pytest.approx(float(scores[~failed].mean()))
    assert math.isfinite(metrics["actor/policy_loss"]) and math.isfinite(metrics["actor/grad_norm"])


def test_a_failed_cost_does_not_undo_a_failed_reward():
    tables = {
        "reward": MASKED,
        "cost": {**MASKED, "function": "tests.algorithms.test_failed_rows:others_fail"},
    }
    config = SafeRLHFConfig(prompts_per_step=32, kl_coef=0.0)
    with TinyRun(KeptSafe(config), tables) as run:
        metrics = run.step()
        batch = run.algorithm.batch
    scores, costs = column(batch, "scores"), column(batch, "costs")
    assert scores.isnan().any() and costs.isnan().any() and (scores.isnan() != costs.isnan()).any()
    kept = column(batch, "loss_mask").any(1)
    assert torch.equal(kept, ~(scores.isnan() | costs.isnan()))
    assert all(math.isfinite(value) for value in metrics.values())


def others_fail(sample: RewardSample) -> float:
    if len(sample.response_ids) and sample.response_ids[-1] % 3 == 0:
        raise OSError("no judge")
    return 0.5


def test_a_run_in_which_too_many_rows_fail_ends():
    rules = {**MASKED, "on_failure": {"mask": True, "max_failed": 0.1}}
    with TinyRun(GRPO(GRPOConfig(prompts_per_step=8, group_size=4)), {"reward": rules}) as run:
        values = run.step()
        metrics = Metrics.of(**values)
        said = r"step 3: \d+% of the rows have failed .*reward\.on_failure\.max_failed = 0\.1"
        with pytest.raises(RewardError, match=said):
            check_failed(run.job, 3, metrics)
    check_failed(tiny_job({"algorithm": "grpo", "reward": MASKED}), 3, metrics)
