"""An engine samples from the distribution that the model gives, by each request's own seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hybridflow.core.rollout import Completion, RolloutEngine, SamplingParams
from hybridflow.core.testing.checks import require
from hybridflow.core.testing.engine_base import PROMPTS, EngineBase, requests
from hybridflow.core.testing.models import VOCAB, Reference
from hybridflow.core.testing.statistics import chi_square_score


class EngineSampling(EngineBase):
    """Seeds, and the distributions of first, second and filtered tokens."""

    def test_a_seed_gives_the_same_tokens_and_another_seed_others(self, start):
        engine = self.speaking(start, next(self.references()))
        prompts = [PROMPTS[1]] * 12
        first, again, other = (self._run(engine, prompts, first_seed=s) for s in (100, 100, 900))
        require(
            self._ids(first) == self._ids(again),
            got="other tokens for the same seeds, prompts and weights",
            expected="the same: a uniform number follows from (seed, position), so runs can be repeated and resumed",
            likely="a generator's state is kept from call to call, or Request.seed is not used",
        )
        require(
            self._ids(first) != self._ids(other) and len({tuple(i) for i in self._ids(first)}) > 6,
            got=f"{len({tuple(i) for i in self._ids(first)})} different responses from 12 seeds",
            expected="different seeds, different responses",
            likely="Request.seed is not used, or one seed serves the whole batch",
        )

    def test_tokens_do_not_depend_on_the_rest_of_the_batch(self, start):
        engine = self.speaking(start, next(self.references()))
        asked = requests([*PROMPTS, *PROMPTS, *PROMPTS], SamplingParams(max_tokens=12))
        together = {c.id: c for c in engine.submit(asked)}
        for request in asked[::3]:
            [alone] = engine.generate([request])
            require(
                alone.response_ids.tolist() == together[request.id].response_ids.tolist(),
                got=f"{alone.response_ids.tolist()} alone, {together[request.id].response_ids.tolist()} among "
                f"{len(asked)}",
                expected="the same tokens, whatever else is in the batch",
                likely="random numbers go by slot or arrival, or neighbouring rows see each other's cache",
            )

    def test_first_tokens_are_distributed_as_the_model_says(self, start):
        ref = next(self.references())
        engine = self.speaking(start, ref)
        for temperature in (1.0, 0.6):
            first = [c.response_ids[0] for c in self._draw(engine, temperature=temperature, max_tokens=1)]
            self._distributed(
                first, self._probabilities(ref, PROMPTS[1], temperature), f"first tokens at temperature {temperature}"
            )

    def test_second_tokens_are_distributed_as_the_model_says_after_the_first(self, start):
        ref = next(self.references())
        both = [tuple(c.response_ids.tolist()) for c in self._draw(self.speaking(start, ref), max_tokens=2)]
        firsts = [f for f, _ in both]
        usual = max(set(firsts), key=firsts.count)
        second = [s for f, s in both if f == usual]
        self._distributed(second, self._probabilities(ref, [*PROMPTS[1], usual], 1.0), f"tokens after {usual}",
                          "one uniform number serves all positions of a sequence")  # fmt: skip

    def test_filtered_tokens_are_distributed_over_what_is_left(self, start):
        if not self.filters:
            pytest.skip("it has no top_k and top_p")
        ref = next(self.references())
        engine = self.speaking(start, ref)
        p = self._probabilities(ref, PROMPTS[1], 1.0)
        order = np.argsort(-p)
        nucleus = order[: int(np.searchsorted(np.cumsum(p[order]), 0.6)) + 1]
        for chosen, kept in ((dict(top_k=4), order[:4]), (dict(top_p=0.6), nucleus)):
            left = np.zeros_like(p)
            left[kept] = p[kept] / p[kept].sum()
            first = [c.response_ids[0] for c in self._draw(engine, max_tokens=1, **chosen)]
            self._distributed(
                first, left, f"first tokens with {chosen}", "top_p is the smallest set whose probability reaches it"
            )

    def _draw(self, engine: RolloutEngine, **sampling) -> list[Completion]:
        return self._run(engine, [PROMPTS[1]] * self.samples, first_seed=0, **sampling)

    def _probabilities(self, ref: Reference, prompt, temperature: float) -> np.ndarray:
        with torch.no_grad():
            return (ref.logits(torch.tensor(prompt))[-1] / temperature).double().softmax(-1).numpy()

    def _distributed(self, seen: Sequence[int], probabilities: np.ndarray, what: str, likely: str = "") -> None:
        counts = np.bincount(np.asarray(seen, dtype=np.int64), minlength=VOCAB)
        score = chi_square_score(counts, probabilities)
        worst = int(np.argmax(np.abs(counts - len(seen) * probabilities)))
        require(
            score < 5,
            got=f"{what}: token {worst} came {counts[worst]} times in {len(seen)}; chi-square is {score:.1f} standard "
            "deviations off",
            expected=f"about {len(seen) * probabilities[worst]:.0f} times, below 5 standard deviations",
            likely=likely
            or "the temperature is not applied, seeds that follow one another give related numbers, or the sampler is "
            "biased",
        )
