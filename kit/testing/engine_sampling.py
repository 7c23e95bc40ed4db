"""An engine samples from the distribution that the model gives, by each request's own seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from hybridflow.core.contracts.rollout import Completion, RolloutEngine, SamplingParams
from hybridflow.kit.testing.checks import require
from hybridflow.kit.testing.engine_base import PROMPTS, EngineBase, requests
from hybridflow.kit.testing.models import VOCAB, Reference
from hybridflow.kit.testing.statistics import chi_square_score


class EngineSampling(EngineBase):
    """Seeds, and the distributions of first, second, filtered and biased tokens."""

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
            first = [
                c.response_ids[0] for c in self._draw(engine, temperature=temperature, max_tokens=1)
            ]
            self._distributed(
                first,
                self._probabilities(ref, PROMPTS[1], temperature),
                f"first tokens at temperature {temperature}",
            )

    def test_second_tokens_are_distributed_as_the_model_says_after_the_first(self, start):
        ref = next(self.references())
        both = [
            tuple(c.response_ids.tolist())
            for c in self._draw(self.speaking(start, ref), max_tokens=2)
        ]
        firsts = [f for f, _ in both]
        usual = max(set(firsts), key=firsts.count)
        second = [s for f, s in both if f == usual]
        self._distributed(second, self._probabilities(ref, [*PROMPTS[1], usual], 1.0), f"tokens after {usual}",
                          "one uniform number serves all positions of a sequence")  # fmt: skip

    def test_filtered_tokens_are_distributed_over_what_is_left(self, start):
        if not self.filters:
            pytest.skip("it has no top_k, top_p and min_p")
        ref = next(self.references())
        engine = self.speaking(start, ref)
        p = self._probabilities(ref, PROMPTS[1], 1.0)
        for chosen in (dict(top_k=4), dict(top_p=0.6), dict(min_p=0.25)):
            first = [c.response_ids[0] for c in self._draw(engine, max_tokens=1, **chosen)]
            self._distributed(
                first, _left(p, **chosen), f"first tokens with {chosen}",
                "top_p is the smallest set whose probability reaches it; min_p is relative to the most likely token",
            )  # fmt: skip

    def test_the_nucleus_is_of_what_min_p_leaves(self, start):
        if not self.filters:
            pytest.skip("it has no top_k, top_p and min_p")
        ref = next(self.references())
        engine = self.speaking(start, ref)
        p = self._probabilities(ref, PROMPTS[1], 1.0)
        chosen = _where_the_order_matters(p)
        first = [c.response_ids[0] for c in self._draw(engine, max_tokens=1, **chosen)]
        self._distributed(
            first, _left(p, **chosen), f"first tokens with {chosen}",
            "top_p is of all tokens, and min_p comes after it; min_p comes first, and the rest is renormalised",
        )  # fmt: skip

    def test_a_bias_is_added_to_the_logits_before_the_temperature(self, start):
        if not self.biases:
            pytest.skip("it has no logit_bias")
        ref = next(self.references())
        engine = self.speaking(start, ref)
        usual, second, third = np.argsort(-self._probabilities(ref, PROMPTS[1], 1.0))[:3].tolist()
        bias = {usual: -100.0, second: -0.7, third: 0.6}
        options: list[dict[str, Any]] = [dict(temperature=0.6), dict(temperature=1.5, top_k=2)]
        for chosen in options if self.filters else options[:1]:
            p = self._probabilities(ref, PROMPTS[1], chosen["temperature"], bias)
            first = [
                c.response_ids[0]
                for c in self._draw(engine, max_tokens=1, logit_bias=bias, **chosen)
            ]
            require(
                usual not in first,
                got=f"token {usual} {first.count(usual)} times in {len(first)} with a bias of -100",
                expected="never",
                likely="logit_bias is not passed on",
            )
            self._distributed(
                first, _left(p, top_k=chosen.get("top_k", 0)), f"first tokens with logit_bias {bias} and {chosen}",
                "biases are added after the temperature, or after top_k",
            )  # fmt: skip

    def test_greedy_tokens_follow_each_requests_own_biases(self, start):
        if not self.biases:
            pytest.skip("it has no logit_bias")
        ref = next(self.references())
        engine = self.speaking(start, ref)
        biases: list[dict[int, float]] = []
        for at, prompt in enumerate(PROMPTS):
            usual = self._greedy(ref, prompt, {})
            biases.append(
                {usual[0]: -100.0, usual[-1]: -2.0, (usual[0] + 1) % VOCAB: 3.0} if at % 2 else {}
            )
        asked = requests(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
        asked = [
            attrs.evolve(r, sampling=attrs.evolve(r.sampling, logit_bias=b))
            for r, b in zip(asked, biases, strict=True)
        ]
        for done, prompt, bias in zip(engine.generate(asked), PROMPTS, biases, strict=True):
            expected = self._greedy(ref, prompt, bias)
            require(
                done.response_ids.tolist() == expected,
                got=f"greedy tokens {done.response_ids.tolist()} after {list(prompt)} with logit_bias {bias}",
                expected=f"{expected}, the largest of logits and biases each time",
                likely="greedy sampling leaves biases out, or one request's biases are used for another",
            )

    def _greedy(self, ref: Reference, prompt, bias: Mapping[int, float]) -> list[int]:
        made: list[int] = []
        while len(made) < 12:
            made.append(int(self._probabilities(ref, [*prompt, *made], 1.0, bias).argmax()))
        return made

    def _draw(self, engine: RolloutEngine, **sampling) -> list[Completion]:
        return self._run(engine, [PROMPTS[1]] * self.samples, first_seed=0, **sampling)

    def _probabilities(
        self, ref: Reference, prompt, temperature: float, bias: Mapping[int, float] | None = None
    ) -> np.ndarray:
        with torch.no_grad():
            logits = ref.logits(torch.tensor(prompt))[-1].double()
        for token, value in (bias or {}).items():
            logits[token] += value
        return (logits / temperature).softmax(-1).numpy()

    def _distributed(
        self, seen: Sequence[int], probabilities: np.ndarray, what: str, likely: str = ""
    ) -> None:
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


def _left(p: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """The probabilities [V] that are drawn from: min_p, then top_k, then top_p of the rest, renormalised."""
    order = np.argsort(-p)
    kept = order[p[order] >= min_p * p.max()][: top_k or None]
    mass = np.cumsum(p[kept]) / p[kept].sum()
    kept = kept[: int(np.searchsorted(mass, top_p)) + 1]
    left = np.zeros_like(p)
    left[kept] = p[kept] / p[kept].sum()
    return left


def _where_the_order_matters(p: np.ndarray) -> dict[str, Any]:
    """A min_p and a top_p whose nucleus of what min_p leaves is smaller than the nucleus of all, as far as can be from
    where rounding decides."""
    ranked = np.sort(p)[::-1]
    before = np.cumsum(ranked) - ranked
    choices = []
    for count in range(3, 12):  # tokens that min_p leaves
        gap = np.log(ranked[count - 1] / ranked[count])
        min_p = np.sqrt(ranked[count - 1] * ranked[count]) / ranked[0]
        for last in range(1, count - 1):  # of the nucleus
            top_p = (before[last] + ranked[last] / 2) / before[count]
            room = min(gap, ranked[last] / 2, top_p - before[last + 1])
            choices.append((room, float(min_p), float(top_p)))
    _, min_p, top_p = max(choices)
    return dict(min_p=min_p, top_p=top_p)
