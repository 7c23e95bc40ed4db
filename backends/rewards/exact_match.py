"""Reward "exact_match": whether the response is the expected answer, letter by letter."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.core.contracts.reward import Reward, RewardSample


class ExactMatch(Reward):
    """The reward is 1.0 where the response equals meta["answer"], else 0.0.

    White space around the two is ignored.
    """

    def __init__(self, ignore_case: bool = False):
        """`ignore_case`: whether "Yes" equals "yes"."""
        self.ignore_case = ignore_case

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [
            float(self._plain(sample.response) == self._plain(sample.answer)) for sample in samples
        ]

    def answer(self, sample: RewardSample) -> str:
        """Return the part of the response that is compared."""
        return self._plain(sample.response)

    def _plain(self, text: str) -> str:
        """Return the part of a text that is compared."""
        return text.strip().casefold() if self.ignore_case else text.strip()
