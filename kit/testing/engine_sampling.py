"""EngineSampling: an engine samples from the model's distribution, by each request's own seed.

Distributions are compared by chi-square tests on the tokens of many sequences.
"""

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
    """Tests of seeds, and of the distributions of first, second, filtered and biased tokens."""

    def test_a_seed_gives_the_same_tokens_and_another_seed_others(self, start):
        """Runs with equal seeds are equal; different seeds of one prompt give other responses."""
        engine = self.speaking(start, next(self.references()))
        prompts = [PROMPTS[1]] * 12
        first = self._ids(self._run(engine, prompts, first_seed=100))
        again = self._ids(self._run(engine, prompts, first_seed=100))
        other = self._ids(self._run(engine, prompts, first_seed=900))
        require(
            first == again,
            got="other tokens for the same seeds, prompts and weights",
            expected="the same: a uniform number follows from (seed, position), so runs can be "
            "repeated and resumed",
            likely="a generator's state is kept from call to call, or Request.seed is not used",
        )

        # Short responses of one prompt may be equal by chance, but hardly half of them.
        different = len({tuple(ids) for ids in first})
        require(
            first != other and different > 6,
            got=f"{different} different responses from 12 seeds",
            expected="different seeds, different responses",
            likely="Request.seed is not used, or one seed serves the whole batch",
        )

    def test_tokens_do_not_depend_on_the_rest_of_the_batch(self, start):
        """A request alone has the tokens that it has among others."""
        engine = self.speaking(start, next(self.references()))
        batch = requests([*PROMPTS, *PROMPTS, *PROMPTS], SamplingParams(max_tokens=12))
        together = {c.id: c.response_ids.tolist() for c in engine.submit(batch)}

        # Every third request, so that each prompt comes alone once.
        for request in batch[::3]:
            [alone] = engine.generate([request])
            tokens = alone.response_ids.tolist()
            require(
                tokens == together[request.id],
                got=f"{tokens} alone, {together[request.id]} among {len(batch)}",
                expected="the same tokens, whatever else is in the batch",
                likely="random numbers go by slot or arrival, or neighbouring rows see each "
                "other's cache",
            )

    def test_first_tokens_are_distributed_as_the_model_says(self, start):
        """First tokens follow softmax(logits / temperature)."""
        ref = next(self.references())
        engine = self.speaking(start, ref)
        for temperature in (1.0, 0.6):
            self._distributed(
                self._first_tokens(engine, temperature=temperature),
                self._probabilities(ref, PROMPTS[1], temperature),
                f"first tokens at temperature {temperature}",
            )

    def test_second_tokens_are_distributed_as_the_model_says_after_the_first(self, start):
        """Second tokens after the commonest first token follow the model's distribution there."""
        ref = next(self.references())
        completions = self._draw(self.speaking(start, ref), max_tokens=2)
        pairs = [tuple(tokens) for tokens in self._ids(completions)]

        # Only one first token is common enough to test what follows it.
        firsts = [first for first, _ in pairs]
        usual = max(set(firsts), key=firsts.count)
        seconds = [second for first, second in pairs if first == usual]
        self._distributed(
            seconds,
            self._probabilities(ref, [*PROMPTS[1], usual], 1.0),
            f"tokens after {usual}",
            "one uniform number serves all positions of a sequence",
        )

    def test_filtered_tokens_are_distributed_over_what_is_left(self, start):
        """top_k, top_p and min_p renormalise over the tokens that they leave."""
        if not self.filters:
            pytest.skip("it has no top_k, top_p and min_p")

        ref = next(self.references())
        engine = self.speaking(start, ref)
        probabilities = self._probabilities(ref, PROMPTS[1], 1.0)
        filters = (dict(top_k=4), dict(top_p=0.6), dict(min_p=0.25))
        for chosen in filters:
            self._distributed(
                self._first_tokens(engine, **chosen),
                _left(probabilities, **chosen),
                f"first tokens with {chosen}",
                "top_p is the smallest set whose probability reaches it; min_p is relative to the "
                "most likely token",
            )

    def test_the_nucleus_is_of_what_min_p_leaves(self, start):
        """min_p is applied before top_p, whose mass is that of the tokens min_p leaves."""
        if not self.filters:
            pytest.skip("it has no top_k, top_p and min_p")

        ref = next(self.references())
        engine = self.speaking(start, ref)
        probabilities = self._probabilities(ref, PROMPTS[1], 1.0)
        chosen = _where_the_order_matters(probabilities)
        self._distributed(
            self._first_tokens(engine, **chosen),
            _left(probabilities, **chosen),
            f"first tokens with {chosen}",
            "top_p is of all tokens, and min_p comes after it; min_p comes first, and the rest is "
            "renormalised",
        )

    def test_a_bias_is_added_to_the_logits_before_the_temperature(self, start):
        """Tokens follow softmax((logits + bias) / temperature), which top_k then filters."""
        if not self.biases:
            pytest.skip("it has no logit_bias")

        ref = next(self.references())
        engine = self.speaking(start, ref)

        # The bias forbids the likeliest token, and moves the next two towards each other.
        ranked = np.argsort(-self._probabilities(ref, PROMPTS[1], 1.0))
        usual, second, third = ranked[:3].tolist()
        bias = {usual: -100.0, second: -0.7, third: 0.6}

        # Top-k shows whether tokens are ranked with their biases.
        options: list[dict[str, Any]] = [dict(temperature=0.6)]
        if self.filters:
            options.append(dict(temperature=1.5, top_k=2))
        for chosen in options:
            probabilities = self._probabilities(ref, PROMPTS[1], chosen["temperature"], bias)
            first = self._first_tokens(engine, logit_bias=bias, **chosen)
            require(
                usual not in first,
                got=f"token {usual} {first.count(usual)} times in {len(first)} with a bias of -100",
                expected="never",
                likely="logit_bias is not passed on",
            )
            self._distributed(
                first,
                _left(probabilities, top_k=chosen.get("top_k", 0)),
                f"first tokens with logit_bias {bias} and {chosen}",
                "biases are added after the temperature, or after top_k",
            )

    def test_greedy_tokens_follow_each_requests_own_biases(self, start):
        """At temperature 0 each token has the largest sum of logit and bias, request by request."""
        if not self.biases:
            pytest.skip("it has no logit_bias")

        ref = next(self.references())
        engine = self.speaking(start, ref)

        # Every second request has biases, which change its greedy response.
        biases: list[dict[int, float]] = []
        for i, prompt in enumerate(PROMPTS):
            tokens = self._greedy(ref, prompt, {})
            bias: dict[int, float] = {}
            if i % 2:
                bias = {
                    tokens[0]: -100.0,
                    tokens[-1]: -2.0,
                    (tokens[0] + 1) % VOCAB: 3.0,
                }
            biases.append(bias)

        # All of them run in one batch, where one's biases might reach another.
        batch = []
        plain = requests(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
        for request, bias in zip(plain, biases, strict=True):
            sampling = attrs.evolve(request.sampling, logit_bias=bias)
            batch.append(attrs.evolve(request, sampling=sampling))

        completions = engine.generate(batch)
        for done, prompt, bias in zip(completions, PROMPTS, biases, strict=True):
            tokens = done.response_ids.tolist()
            expected = self._greedy(ref, prompt, bias)
            require(
                tokens == expected,
                got=f"greedy tokens {tokens} after {list(prompt)} with logit_bias {bias}",
                expected=f"{expected}, the largest of logits and biases each time",
                likely="greedy sampling leaves biases out, or one request's biases are used for "
                "another",
            )

    def _greedy(self, ref: Reference, prompt, bias: Mapping[int, float]) -> list[int]:
        """Return the reference's 12 greedy tokens with these biases."""
        response: list[int] = []
        while len(response) < 12:
            probabilities = self._probabilities(ref, [*prompt, *response], 1.0, bias)
            response.append(int(probabilities.argmax()))
        return response

    def _draw(self, engine: RolloutEngine, **sampling) -> list[Completion]:
        """Return `samples` completions of one prompt, with seeds from 0."""
        prompts = [PROMPTS[1]] * self.samples
        return self._run(engine, prompts, first_seed=0, **sampling)

    def _first_tokens(self, engine: RolloutEngine, **sampling) -> list[int]:
        """Return the first tokens of `samples` responses to one prompt."""
        completions = self._draw(engine, max_tokens=1, **sampling)
        return [completion.response_ids[0] for completion in completions]

    def _probabilities(
        self, ref: Reference, prompt, temperature: float, bias: Mapping[int, float] | None = None
    ) -> np.ndarray:
        """Return the probabilities of the token after the prompt, float64 [V]."""
        with torch.no_grad():
            logits = ref.logits(torch.tensor(prompt))[-1].double()
        for token, value in (bias or {}).items():
            logits[token] += value
        return (logits / temperature).softmax(-1).numpy()

    def _distributed(
        self, seen: Sequence[int], probabilities: np.ndarray, what: str, likely: str = ""
    ) -> None:
        """Require that the counts of the tokens agree with the probabilities [V]."""
        counts = np.bincount(np.asarray(seen, dtype=np.int64), minlength=VOCAB)
        score = chi_square_score(counts, probabilities)
        expected = len(seen) * probabilities
        worst = int(np.argmax(np.abs(counts - expected)))

        # A right sampler exceeds 5 standard deviations about once in 3.5 million tests.
        require(
            score < 5,
            got=f"{what}: token {worst} came {counts[worst]} times in {len(seen)}; chi-square is "
            f"{score:.1f} standard deviations off",
            expected=f"about {expected[worst]:.0f} times, below 5 standard deviations",
            likely=likely
            or "the temperature is not applied, seeds that follow one another give related "
            "numbers, or the sampler is biased",
        )


def _left(p: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Return the probabilities [V] that tokens are drawn from.

    min_p is applied first, then top_k, then top_p to what they leave; the rest is renormalised.
    """
    ranked = np.argsort(-p)
    tokens = ranked[p[ranked] >= min_p * p.max()]
    tokens = tokens[: top_k or None]

    # The nucleus is the smallest set of the likeliest tokens whose mass reaches top_p.
    mass = np.cumsum(p[tokens]) / p[tokens].sum()
    tokens = tokens[: int(np.searchsorted(mass, top_p)) + 1]
    left = np.zeros_like(p)
    left[tokens] = p[tokens] / p[tokens].sum()
    return left


def _where_the_order_matters(p: np.ndarray) -> dict[str, Any]:
    """Return a min_p and a top_p that leave more tokens if top_p is applied first.

    So the nucleus of the tokens that min_p leaves is smaller than the nucleus of all tokens. Of the
    possible pairs it is the one farthest from where rounding decides.
    """
    ranked = np.sort(p)[::-1]
    # The mass of all tokens before each one, by rank.
    before = np.cumsum(ranked) - ranked

    choices = []
    for count in range(3, 12):
        # min_p leaves the first `count` tokens: it lies halfway, in logarithms, to the next one.
        gap = np.log(ranked[count - 1] / ranked[count])
        min_p = np.sqrt(ranked[count - 1] * ranked[count]) / ranked[0]
        for last in range(1, count - 1):
            # The nucleus of what is left ends within token `last`. The nucleus of all tokens has
            # another token, where top_p is above the mass of the first `last` + 1.
            top_p = (before[last] + ranked[last] / 2) / before[count]
            room = min(gap, ranked[last] / 2, top_p - before[last + 1])
            choices.append((room, float(min_p), float(top_p)))

    _, min_p, top_p = max(choices)
    return dict(min_p=min_p, top_p=top_p)
