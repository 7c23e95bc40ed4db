"""The rewards that hybridflow brings."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.rewards import plugin
from hybridflow.backends.rewards.code import CodeReward
from hybridflow.backends.rewards.environment import EnvironmentReward
from hybridflow.backends.rewards.exact_match import ExactMatch
from hybridflow.backends.rewards.foreign import TRLReward, VerlReward
from hybridflow.backends.rewards.judge import Judge
from hybridflow.backends.rewards.math import MathReward


def test_seven_rewards_are_brought_under_their_names():
    check_brought(
        plugin,
        exact_match=ExactMatch,
        code=CodeReward,
        environment=EnvironmentReward,
        judge=Judge,
        trl=TRLReward,
        verl=VerlReward,
        math=MathReward,
    )
