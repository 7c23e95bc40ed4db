"""RewardConformance: one finite number per sample, in order, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hybridflow.core.contracts.reward import Reward, RewardSample
from hybridflow.core.workers.scoring import score_samples
from hybridflow.kit.testing.checks import missing_fixture, require


def sample(response: str, answer: str = "42", finish_reason: str = "stop") -> RewardSample:
    """A response to "6*7=", whose expected answer is "42"."""
    ids = np.frombuffer(response.encode(), dtype=np.uint8).astype(np.int64)
    return RewardSample("6*7=", response, ids, {"answer": answer, "prompt": "6*7="}, finish_reason)


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


class RewardConformance:
    """Give a fixture `reward`: an instance of your Reward (`FunctionReward(f)` for a function)."""

    @pytest.fixture
    def reward(self) -> Reward:
        return missing_fixture(self, "reward", "an instance of your Reward")

    def samples(self) -> Sequence[RewardSample]:
        """What it is tried on; override it where `meta` needs other fields."""
        return [sample(r, finish_reason="length" if len(r) > 99 else "stop") for r in RESPONSES]

    def expected(self) -> Sequence[tuple[RewardSample, float]]:
        """Samples with their known scores."""
        return []

    def test_each_sample_gets_one_finite_number(self, reward):
        scores = score_samples(reward, list(self.samples()), "conformance")
        require(
            scores.shape == (len(self.samples()),) and np.isfinite(scores).all(),
            got=f"scores {scores}",
            expected=f"{len(self.samples())} finite numbers",
            likely="score_samples says which row is wrong",
        )

    def test_a_score_does_not_depend_on_the_other_samples(self, reward):
        samples = list(self.samples())
        together = score_samples(reward, samples, "conformance")
        order = np.random.default_rng(0).permutation(len(samples))
        shuffled = score_samples(reward, [samples[i] for i in order], "conformance")
        alone = np.array([score_samples(reward, [s], "conformance")[0] for s in samples])
        for what, found in (
            ("one by one", alone),
            ("in another order", shuffled[np.argsort(order)]),
        ):
            require(
                np.array_equal(found, together),
                got=f"{found.tolist()} {what}",
                expected=f"{together.tolist()}: rows are split over ranks as it happens",
                likely="the reward normalises over its batch (that is the algorithm's work), keeps state or is random",
            )

    def test_no_samples_give_no_scores(self, reward):
        found = list(reward([]))
        require(
            found == [],
            got=f"{found!r} for no samples",
            expected="an empty list: a rank may have no rows",
            likely="a mean or a stack over nothing",
        )

    def test_known_responses_have_their_scores(self, reward):
        if not self.expected():
            pytest.skip("expected() is not overridden")
        for one, score in self.expected():
            [found] = score_samples(reward, [one], "conformance")
            require(
                abs(found - score) < 1e-6,
                got=f"{found} for response {one.response!r} (answer {one.meta.get('answer')!r})",
                expected=f"{score}",
                likely="the reward reads the response in another way than its author meant",
            )
