"""Reward "environment": the rewards that the environment gave in the episode."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import RewardError


class EnvironmentReward(Reward):
    """The reward is the episode's return: the sum of the rewards of its turns."""

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._returned(sample) for sample in samples]

    def _returned(self, sample: RewardSample) -> float:
        """Return the episode's return; raises RewardError for a sample without an episode."""
        if sample.episode_return is None:
            raise RewardError("there is no environment; give [environment], or another reward")
        return sample.episode_return
