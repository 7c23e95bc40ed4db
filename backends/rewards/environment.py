"""Reward "environment": what the environment gave in the episode."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.errors import RewardError


class EnvironmentReward(Reward):
    """The sum of the rewards of the episode's turns."""

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._returned(sample) for sample in samples]

    def _returned(self, sample: RewardSample) -> float:
        if sample.episode_return is None:
            raise RewardError("there is no environment; give [environment], or another reward")
        return sample.episode_return
