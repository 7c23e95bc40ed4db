"""RewardConformance: one finite number per sample, in order, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hybridflow.core.contracts.reward import Reward, RewardFailureRule, RewardSample
from hybridflow.core.workers.failures import score_by_rule
from hybridflow.kit.testing.checks import missing_fixture, require


def sample(response: str, answer: str = "42", finish_reason: str = "stop") -> RewardSample:
    """Return a response to "6*7=" whose meta has the expected `answer`; its ids are its bytes."""
    ids = np.frombuffer(response.encode(), dtype=np.uint8).astype(np.int64)
    meta = {"answer": answer, "prompt": "6*7="}
    return RewardSample("6*7=", response, ids, meta, finish_reason)


def scored(reward: Reward, samples: Sequence[RewardSample]) -> np.ndarray:
    """Return the scores float32 [n] as a run gets them: of plain and of async functions alike.

    A reward that fails raises RewardError, which names the row.
    """
    scores, _ = score_by_rule(reward, samples, "conformance", RewardFailureRule())
    return np.asarray(scores)


RESPONSES = (
    "42",
    " 42 ",
    "43",
    "",
    "no idea",
    "4" * 500,
    "\u0000\u2603 \\boxed{",
    "the answer is 42",
    "-1e309",
    "nan",
)
"""Right and wrong answers, and text that a parser may stumble over."""


class RewardConformance:
    """Subclass it and give a fixture `reward`: an instance of your Reward.

    For a function f, plain or async, it is `FunctionReward(f)`.
    """

    @pytest.fixture
    def reward(self) -> Reward:
        """The author's reward."""
        return missing_fixture(self, "reward", "an instance of your Reward")

    def samples(self) -> Sequence[RewardSample]:
        """Return the samples to score; override it where `meta` needs other fields."""
        # Very long responses are those that were cut at the limit.
        samples = []
        for response in RESPONSES:
            finish_reason = "length" if len(response) > 99 else "stop"
            samples.append(sample(response, finish_reason=finish_reason))
        return samples

    def expected(self) -> Sequence[tuple[RewardSample, float]]:
        """Return samples with their known scores; override it to have them checked."""
        return []

    def test_each_sample_gets_one_finite_number(self, reward):
        """Scores are finite, one per sample."""
        scores = scored(reward, list(self.samples()))
        # It raises where a score is missing or is no number.
        count = len(self.samples())
        require(
            scores.shape == (count,) and np.isfinite(scores).all(),
            got=f"scores {scores}",
            expected=f"{count} finite numbers",
            likely="the error says which row is wrong",
        )

    def test_a_score_does_not_depend_on_the_other_samples(self, reward):
        """Samples alone, and in another order, have the same scores as together."""
        samples = list(self.samples())
        together = scored(reward, samples)

        # The scores of the shuffled samples, brought back into their order.
        order = np.random.default_rng(0).permutation(len(samples))
        shuffled = scored(reward, [samples[i] for i in order])
        in_order = shuffled[np.argsort(order)]
        alone = np.array([scored(reward, [one])[0] for one in samples])

        # Equal to the last bit, for a score is a function of its sample.
        for what, scores in (("one by one", alone), ("in another order", in_order)):
            require(
                np.array_equal(scores, together),
                got=f"{scores.tolist()} {what}",
                expected=f"{together.tolist()}: rows are split over ranks as it happens",
                likely="the reward normalises over its batch (that is the algorithm's work), keeps "
                "state or is random",
            )

    def test_no_samples_give_no_scores(self, reward):
        """A rank may have no rows."""
        scores = list(reward([]))
        require(
            scores == [],
            got=f"{scores!r} for no samples",
            expected="an empty list: a rank may have no rows",
            likely="a mean or a stack over nothing",
        )

    def test_known_responses_have_their_scores(self, reward):
        """The samples of `expected` get the scores that it says, up to 1e-6."""
        if not self.expected():
            pytest.skip("expected() is not overridden")

        for one, expected in self.expected():
            [score] = scored(reward, [one])
            require(
                abs(score - expected) < 1e-6,
                got=f"{score} for response {one.response!r} (answer {one.meta.get('answer')!r})",
                expected=f"{expected}",
                likely="the reward reads the response in another way than its author meant",
            )
