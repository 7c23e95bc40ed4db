"""GiGPO: by hand, under hybridflow's kit, and against GRPO on a task of two steps."""

from __future__ import annotations

import math

import pytest
import torch
from hybridflow_gigpo import GiGPO, GiGPOConfig, step_advantages

from hybridflow.core.contracts.environment import Answer, Environment
from hybridflow.kit.testing import AlgorithmConformance, TinyRun


class Doors(Environment):
    """Two turns: each is rewarded by the share of even tokens in it; the second's state is what the first ended with."""

    stops = ("=",)

    def reset(self, start):
        return Answer(state="hall")

    def step(self, turn):
        even = float((turn.ids % 2 == 0).mean())
        return Answer(
            "+", reward=even, done=turn.ended or turn.number == 1, state=f"room {len(turn.ids) % 2}"
        )


TABLES = {
    "environment": {"name": "test_gigpo:Doors"},
    "reward": {"function": "environment"},
    "sampling": {"max_tokens": 12, "logit_bias": {"14": 2.0}},
}


class TestGiGPO(AlgorithmConformance):
    @pytest.fixture
    def algorithm(self):
        return GiGPO(GiGPOConfig(prompts_per_step=4, group_size=4))

    def tables(self):
        return TABLES


def test_steps_are_compared_in_the_states_that_recur():
    rewards, states = [[0.0, 1.0], [0.0, 0.0], [2.0]], [["a", "b"], ["a", "c"], ["a"]]
    found, compared = step_advantages(
        rewards, states, torch.tensor([0, 0, 0]), gamma=0.5, scale="none"
    )
    # to go in state a: 0.5, 0, 2, mean 2.5 / 3; b and c occur once
    mean = 2.5 / 3
    want = torch.tensor([[0.5 - mean, 0.0], [0.0 - mean, 0.0], [2.0 - mean, 0.0]])
    torch.testing.assert_close(found, want)
    assert compared == pytest.approx(3 / 5)


def test_groups_do_not_share_states():
    found, compared = step_advantages([[1.0], [0.0]], [["a"], ["a"]], torch.tensor([0, 1]), 1.0)
    assert not found.any() and compared == 0.0
    found, compared = step_advantages([[], []], [[], []], torch.tensor([0, 0]), 1.0)
    assert found.shape == (2, 1) and not found.any() and compared == 0.0


def test_episode_and_step_advantages_add_up_on_the_tokens_of_their_turn():
    algorithm = GiGPO(GiGPOConfig(scale="none", step_weight=2.0, gamma=1.0))
    turn = torch.tensor([[0, -1, 1], [0, 0, 0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    found = algorithm.advantages(
        scores=torch.tensor([3.0, 1.0]), group=torch.tensor([5, 5]), loss_mask=mask, turn=turn,
        turn_rewards=[[1.0, 2.0], [1.0]], turn_states=[["a", "b"], ["a"]],
    )  # fmt: skip
    # episodes: 1 and -1.  state a: 3 and 1, so 1 and -1, twice; b alone: 0
    torch.testing.assert_close(
        found["advantages"], torch.tensor([[3.0, 0.0, 1.0], [-3.0, -3.0, 0.0]])
    )


def test_failed_episodes_count_for_nobody():
    algorithm = GiGPO(GiGPOConfig(scale="none", step_weight=2.0, gamma=1.0))
    columns = dict(
        group=torch.tensor([5, 5, 5]), turn=torch.zeros(3, 1),
        turn_rewards=[[3.0], [9.0], [1.0]], turn_states=[["a"], ["a"], ["a"]],
    )  # fmt: skip
    found = algorithm.advantages(
        torch.tensor([3.0, math.nan, 1.0]), loss_mask=torch.tensor([[1.0], [0.0], [1.0]]), **columns
    )
    # without the second one the episodes' mean is 2, and so is that of the steps in state a
    torch.testing.assert_close(found["advantages"], torch.tensor([[3.0], [0.0], [-3.0]]))
    assert found["compared_steps"] == 1.0
    for scores in ([math.nan] * 3, [math.nan, math.nan, 1.0]):  # all of a group, and all but one
        found = algorithm.advantages(torch.tensor(scores), loss_mask=torch.ones(3, 1), **columns)
        assert not found["advantages"].any()


def test_the_reward_rises():
    algorithm = GiGPO(GiGPOConfig(prompts_per_step=8, group_size=8))
    with TinyRun(algorithm, {**TABLES, "actor": {"optimizer": {"lr": 5e-3}}}) as run:
        metrics = [run.step() for _ in range(10)]
    assert metrics[0]["compared_steps"] > 0.5
    scores = [m["reward/scores"] for m in metrics]
    assert sum(scores[-3:]) / 3 > sum(scores[:2]) / 2 + 0.15
