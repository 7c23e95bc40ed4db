"""The reward "environment"."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.backends.rewards.environment import EnvironmentReward
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import RewardError


def episode(returned: float | None) -> RewardSample:
    return RewardSample("p", "r", np.zeros(1, np.int64), {}, episode_return=returned)


def test_each_sample_gets_what_its_episode_returned():
    assert EnvironmentReward()([episode(1.5), episode(-2.0), episode(0.0)]) == [1.5, -2.0, 0.0]


def test_without_an_environment_it_says_what_to_give():
    said = r"there is no environment; give \[environment\], or another reward"
    with pytest.raises(RewardError, match=said):
        EnvironmentReward()([episode(1.0), episode(None)])
