"""The rewards that hybridflow brings."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.rewards import plugin
from hybridflow.backends.rewards.code import CodeReward
from hybridflow.backends.rewards.environment import EnvironmentReward
from hybridflow.backends.rewards.exact_match import ExactMatch
from hybridflow.backends.rewards.foreign import TRLReward, VerlReward
from hybridflow.backends.rewards.math import MathReward


def test_four_rewards_of_which_math_needs_math_verify():
    check_brought(
        plugin,
        Brought("reward", "exact_match", ExactMatch),
        Brought("reward", "code", CodeReward),
        Brought("reward", "environment", EnvironmentReward),
        Brought("reward", "trl", TRLReward),
        Brought("reward", "verl", VerlReward),
        Brought("reward", "math", MathReward, requires=("math_verify",), extra="math"),
    )
