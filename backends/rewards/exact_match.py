"""Reward "exact_match": the response is the answer, or it is not."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.core.contracts.reward import Reward, RewardSample


class ExactMatch(Reward):
    """1.0 where the response equals meta["answer"], white space around them aside, else 0.0."""

    def __init__(self, ignore_case: bool = False):
        """`ignore_case`: "Yes" equals "yes"."""
        self.ignore_case = ignore_case

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [
            float(self._plain(sample.response) == self._plain(sample.answer)) for sample in samples
        ]

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()
