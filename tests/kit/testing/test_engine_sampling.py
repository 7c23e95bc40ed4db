"""Every invariant of EngineSampling notices the fault that it is for."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.expect import each_fault
from helpers.faulty_engines import Broken, NoTemperature, caught_in_engine, with_sampling

from hybridflow.backends.transformers import scheduler
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.backends.transformers.sampler import TokenSampler
from hybridflow.kit.testing.engine_sampling import EngineSampling


class OneSeedForAll(Broken):
    def asked(self, request):
        return attrs.evolve(request, seed=1)


class KeepsAGenerator(Broken):
    calls = 0

    def asked(self, request):
        self.calls += 1
        return attrs.evolve(request, seed=request.seed + 1000 * self.calls)


class SeedsBySlot(Broken):
    def submit(self, requests):
        return super().submit([attrs.evolve(r, seed=100 + at) for at, r in enumerate(requests)])


class RepeatsItsDraw(Broken):
    """The same uniform number at every position: each token is drawn as if it were the first."""

    def submit(self, requests):
        if not requests or requests[0].sampling.max_tokens != 2:
            yield from super().submit(requests)
            return
        one = [with_sampling(r, max_tokens=1) for r in requests]
        first = {c.id: c.response_ids for c in TransformersEngine.submit(self, one)}
        longer = [attrs.evolve(r, prompt_ids=np.append(r.prompt_ids, first[r.id])) for r in one]
        for c in TransformersEngine.submit(self, longer):
            two = {name: np.resize(getattr(c, name), 2) for name in ("logprobs", "weight_version")}
            yield attrs.evolve(c, response_ids=np.append(first[c.id], c.response_ids), **two)


class IgnoresFilters(Broken):
    def asked(self, request):
        return with_sampling(request, top_k=0, top_p=1.0)


class IgnoresMinP(Broken):
    def asked(self, request):
        return with_sampling(request, min_p=0.0)


class TooNarrowNucleus(Broken):
    def asked(self, request):
        top_p = request.sampling.top_p
        return with_sampling(request, top_p=top_p - 0.25) if top_p < 1 else request


class OwnSampler(Broken):
    """Samples with `sampler`."""

    def submit(self, requests):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "TokenSampler", self.sampler)
            yield from super().submit(requests)


class MinPAfterTheNucleus(OwnSampler):
    class sampler(TokenSampler):
        def _filtered(self, logp, uniform):
            probs, order = logp.exp().sort(-1, descending=True)
            outside = (probs.cumsum(-1) - probs >= self.top_p).gather(1, order.argsort(-1))
            self.top_p = torch.ones_like(self.top_p)
            return super()._filtered(logp.masked_fill(outside, -torch.inf), uniform)


class BiasesAfterTopK(OwnSampler):
    class sampler(TokenSampler):
        def _with_biases(self, logp):
            self.plain = logp
            return super()._with_biases(logp)

        def _filtered(self, logp, uniform):
            if self.biased is not None:
                plain = self.plain[self.filtered]
                least = plain.topk(self.width).values[:, -1:]
                logp = logp.masked_fill(plain < least, -torch.inf)
            return super()._filtered(logp, uniform)


class IgnoresBiases(Broken):
    def asked(self, request):
        return with_sampling(request, logit_bias=())


class BiasesAfterTheTemperature(Broken):
    def asked(self, request):
        asked = request.sampling
        scaled = {token: bias * asked.temperature for token, bias in asked.logit_bias}
        return with_sampling(request, logit_bias=scaled)


class OneBiasForAll(Broken):
    def submit(self, requests):
        bias = max((r.sampling.logit_bias for r in requests), key=len, default=())
        return super().submit([with_sampling(r, logit_bias=bias) for r in requests])


FAULTS = {
    "test_a_seed_gives_the_same_tokens_and_another_seed_others": [OneSeedForAll, KeepsAGenerator],
    "test_tokens_do_not_depend_on_the_rest_of_the_batch": [SeedsBySlot],
    "test_first_tokens_are_distributed_as_the_model_says": [NoTemperature, OneSeedForAll],
    "test_second_tokens_are_distributed_as_the_model_says_after_the_first": [RepeatsItsDraw],
    "test_filtered_tokens_are_distributed_over_what_is_left": [
        IgnoresFilters,
        TooNarrowNucleus,
        IgnoresMinP,
    ],
    "test_the_nucleus_is_of_what_min_p_leaves": [MinPAfterTheNucleus],
    "test_a_bias_is_added_to_the_logits_before_the_temperature": [
        IgnoresBiases,
        BiasesAfterTheTemperature,
        BiasesAfterTopK,
    ],
    "test_greedy_tokens_follow_each_requests_own_biases": [IgnoresBiases, OneBiasForAll],
}


@each_fault(EngineSampling, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught_in_engine(EngineSampling, fault, method)


@pytest.mark.parametrize(
    ("flag", "method"),
    [
        ("filters", "test_filtered_tokens_are_distributed_over_what_is_left"),
        ("filters", "test_the_nucleus_is_of_what_min_p_leaves"),
        ("biases", "test_a_bias_is_added_to_the_logits_before_the_temperature"),
        ("biases", "test_greedy_tokens_follow_each_requests_own_biases"),
    ],
)
def test_what_an_engine_does_not_follow_is_skipped(flag, method):
    kit = type("Kit", (EngineSampling,), {flag: False})()
    with pytest.raises(pytest.skip.Exception):
        getattr(kit, method)(start=None)
