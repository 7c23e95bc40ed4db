"""Every invariant of RolloutEngineConformance notices the fault that it is for: our engine, broken on purpose."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.expect import caught

from hybridflow.backends.transformers import scheduler
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.backends.transformers.sampler import Sampler
from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.values.weights import Param
from hybridflow.kit.testing import RolloutEngineConformance, give_weights, one_rank


class Kit(RolloutEngineConformance):
    architectures = ("llama",)


class Broken(TransformersEngine):
    """Our engine with what is asked and what is answered passed through `asked` and `answered`."""

    def asked(self, request):
        return request

    def answered(self, completion, request):
        return completion

    def submit(self, requests):
        by_id = {r.id: r for r in requests}
        stream = super().submit([self.asked(r) for r in requests])
        return (self.answered(c, by_id[c.id]) for c in stream)


def changed(completion, **columns):
    return attrs.evolve(completion, **columns)


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


class NoTemperature(Broken):
    def asked(self, request):
        s = request.sampling
        return attrs.evolve(request, sampling=attrs.evolve(s, temperature=1.0 if s.temperature else 0.0))


class SamplesWhenGreedy(Broken):
    def asked(self, request):
        s = request.sampling
        return attrs.evolve(request, sampling=attrs.evolve(s, temperature=s.temperature or 1.0))


class LogprobsOfTheNext(Broken):
    def answered(self, completion, request):
        return changed(completion, logprobs=np.roll(completion.logprobs, 1))


class RenormalisedLogprobs(Broken):
    """After top_k and top_p, as some engines give them."""

    def answered(self, completion, request):
        s = request.sampling
        filtered = s.top_k or s.top_p < 1
        return changed(
            completion, logprobs=np.minimum(completion.logprobs + 0.2, 0) if filtered else completion.logprobs
        )


class RenormalisedByMinP(Broken):
    def answered(self, completion, request):
        more = 0.2 if request.sampling.min_p else 0.0
        return changed(completion, logprobs=np.minimum(completion.logprobs + more, 0))


class LogprobsWithBiases(Broken):
    def answered(self, completion, request):
        added = np.float32([dict(request.sampling.logit_bias).get(t, 0.0) for t in completion.response_ids.tolist()])
        return changed(completion, logprobs=completion.logprobs + added)


class StaleWeights(Broken):
    """Takes the first update, and no other."""

    def receive(self, name, box, tensor):
        if self.version is None:
            super().receive(name, box, tensor)


class WritesBoxesToTheTop(Broken):
    def receive(self, name, box, tensor):
        n = tensor.shape[0]
        first = type(box)((0, *box.start[1:]), (n, *box.stop[1:]))
        super().receive(name, box, tensor)
        if box.start[0]:
            super().receive(name, first, tensor)


class BeginsWithNoise(Broken):
    def start(self):
        super().start()
        noise = {name: torch.randn(param.shape) for name, param in self.layout().params.items()}
        give_weights(self, noise, 0)


class SpeaksDuringUpdates(Broken):
    def check_ready(self):
        pass


class TakesHalfUpdates(Broken):
    def begin_update(self, version):
        super().begin_update(version)
        for place in self.store.places.values():
            place.storage.zero_()  # what memory held before may be a number or none, and a NaN is refused later

    def end_update(self):
        RolloutEngine.end_update(self)


class CountsVersionsItself(Broken):
    def answered(self, completion, request):
        return changed(completion, weight_version=np.ones_like(completion.weight_version))


class OwnNames(Broken):
    def layout(self):
        layout = super().layout()
        return attrs.evolve(layout, params={n.removeprefix("model."): p for n, p in layout.params.items()})


class PaddedVocabulary(Broken):
    def layout(self):
        layout = super().layout()
        padded = {n: Param((64, *p.shape[1:]), p.dtype) if "embed" in n else p for n, p in layout.params.items()}
        return attrs.evolve(layout, params=padded)


class RepeatsItsDraw(Broken):
    """The same uniform number at every position: each token is drawn as if it were the first."""

    def submit(self, requests):
        if not requests or requests[0].sampling.max_tokens != 2:
            yield from super().submit(requests)
            return
        one = [attrs.evolve(r, sampling=attrs.evolve(r.sampling, max_tokens=1)) for r in requests]
        first = {c.id: c for c in TransformersEngine.submit(self, one)}
        longer = [
            attrs.evolve(r, prompt_ids=np.append(r.prompt_ids, first[r.id].response_ids), sampling=one[0].sampling)
            for r in requests
        ]
        for c in TransformersEngine.submit(self, longer):
            both = np.append(first[c.id].response_ids, c.response_ids)
            yield changed(c, response_ids=both)


class IgnoresFilters(Broken):
    def asked(self, request):
        return attrs.evolve(request, sampling=attrs.evolve(request.sampling, top_k=0, top_p=1.0))


class IgnoresMinP(Broken):
    def asked(self, request):
        return attrs.evolve(request, sampling=attrs.evolve(request.sampling, min_p=0.0))


class TooNarrowNucleus(Broken):
    def asked(self, request):
        s = request.sampling
        return attrs.evolve(request, sampling=attrs.evolve(s, top_p=s.top_p - 0.25 if s.top_p < 1 else 1.0))


class OwnSampler(Broken):
    """Samples with `sampler`."""

    def submit(self, requests):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "Sampler", self.sampler)
            yield from super().submit(requests)


class MinPAfterTheNucleus(OwnSampler):
    class sampler(Sampler):
        def _filtered(self, logp, uniform):
            probs, order = logp.exp().sort(-1, descending=True)
            outside = (probs.cumsum(-1) - probs >= self.top_p).gather(1, order.argsort(-1))
            self.top_p = torch.ones_like(self.top_p)
            return super()._filtered(logp.masked_fill(outside, -torch.inf), uniform)


class BiasesAfterTopK(OwnSampler):
    class sampler(Sampler):
        def _with_biases(self, logp):
            self.plain = logp
            return super()._with_biases(logp)

        def _filtered(self, logp, uniform):
            if self.biased is not None:
                plain = self.plain[self.filtered]
                logp = logp.masked_fill(plain < plain.topk(self.width).values[:, -1:], -torch.inf)
            return super()._filtered(logp, uniform)


class IgnoresBiases(Broken):
    def asked(self, request):
        return attrs.evolve(request, sampling=attrs.evolve(request.sampling, logit_bias=()))


class BiasesAfterTheTemperature(Broken):
    def asked(self, request):
        s = request.sampling
        scaled = {token: bias * s.temperature for token, bias in s.logit_bias}
        return attrs.evolve(request, sampling=attrs.evolve(s, logit_bias=scaled))


class OneBiasForAll(Broken):
    def submit(self, requests):
        bias = max((r.sampling.logit_bias for r in requests), key=len, default=())
        return super().submit([attrs.evolve(r, sampling=attrs.evolve(r.sampling, logit_bias=bias)) for r in requests])


class DropsTheStopToken(Broken):
    def answered(self, completion, request):
        n = len(completion.response_ids) - (completion.finish_reason == "stop")
        columns = {k: getattr(completion, k)[:n] for k in ("response_ids", "logprobs", "weight_version")}
        return changed(completion, **columns)


class GoesOnAfterAStop(Broken):
    def asked(self, request):
        return attrs.evolve(request, sampling=attrs.evolve(request.sampling, stop_token_ids=()))


class SaysLengthAtTheLimit(Broken):
    def answered(self, completion, request):
        full = len(completion.response_ids) == request.sampling.max_tokens
        return changed(completion, finish_reason="length" if full else completion.finish_reason)


class LosesOne(Broken):
    def submit(self, requests):
        return iter(list(super().submit(requests))[: max(len(requests) - 1, 1)])


class AnswersTwice(Broken):
    def submit(self, requests):
        done = list(super().submit(requests))
        return iter(done + done[:1])


class GivesThemAsTheyCome(Broken):
    def generate(self, requests):
        return list(self.submit(requests))


class WideArrays(Broken):
    def answered(self, completion, request):
        return changed(completion, logprobs=completion.logprobs.astype(np.float64))


class FailsOnNothing(Broken):
    def submit(self, requests):
        return iter([*super().submit(requests)][:1]) if requests else iter([None])


class PrefixAsPrompt(Broken):
    def asked(self, request):
        if request.prefix_ids is None:
            return request
        prompt = np.append(request.prompt_ids, request.prefix_ids)
        return attrs.evolve(request, prompt_ids=prompt, prefix_ids=None, prefix_logprobs=None, prefix_versions=None)


class OwnSeedAfterAPrefix(Broken):
    def asked(self, request):
        return attrs.evolve(request, seed=request.seed + (request.prefix_ids is not None))


class DropsAborted(Broken):
    def submit(self, requests):
        return (c for c in super().submit(requests) if c.finish_reason != "abort")


class NeverAborts(Broken):
    def abort(self, ids=None):
        pass


class WakesToNoise(Broken):
    slept = False

    def sleep(self):
        super().sleep()
        self.slept = True

    def asked(self, request):
        return attrs.evolve(request, seed=request.seed + self.slept)


class DropsWhatItLent(Broken):
    def sleep(self):
        super().sleep()
        self.store._lent.clear()
        self.store.drop()


class ForgetsWhoJoined(TransformersEngine):
    def enter(self, request):
        if self._run is not None and not self._run.over:
            return
        super().enter(request)


class SeedsByArrival(TransformersEngine):
    count = 0

    def add(self, request):
        self.count += 1
        super().add(attrs.evolve(request, seed=request.seed + 50 * self.count))


class StampsAtTheEnd(Broken):
    def answered(self, completion, request):
        return changed(completion, weight_version=np.full_like(completion.weight_version, self.version))


class BeginsAnewAfterAnUpdate(Broken):
    """The tokens of before are drawn again, by the new weights."""

    def answered(self, completion, request):
        if len(set(completion.weight_version.tolist())) < 2:
            return completion
        self._free = True
        self.running.clear()
        self._run = None
        number, self._stream_number = self._stream_number, self._stream_number
        [again] = list(super(Broken, self).submit([request]))
        self._stream_number = number
        return changed(again, weight_version=completion.weight_version)


FAULTS = [
    (ForgetsWhoJoined, "test_requests_join_those_that_run", "lost, or answered twice"),
    (SeedsByArrival, "test_requests_join_those_that_run", "seeds follow slots"),
    (StampsAtTheEnd, "test_weights_may_change_while_sequences_run", "one version"),
    (BeginsAnewAfterAnUpdate, "test_weights_may_change_while_sequences_run", "drawn again"),
    (SamplesWhenGreedy, "test_greedy_tokens_are_those_of_hugging_face", "temperature 0"),
    (NoTemperature, "test_logprobs_are_those_of_a_forward_over_the_whole_sequence", "temperature"),
    (LogprobsOfTheNext, "test_logprobs_are_those_of_a_forward_over_the_whole_sequence", "another position"),
    (RenormalisedLogprobs, "test_logprobs_are_those_before_filters", "renormalised"),
    (RenormalisedByMinP, "test_logprobs_are_those_before_filters", "renormalised"),
    (LogprobsWithBiases, "test_logprobs_are_those_before_biases", "biases added"),
    (StaleWeights, "test_after_an_update_the_new_weights_speak", "second update"),
    (WritesBoxesToTheTop, "test_parts_of_a_parameter_make_up_the_whole", "box"),
    (BeginsWithNoise, "test_it_refuses_before_it_has_weights", "check_ready"),
    (SpeaksDuringUpdates, "test_it_refuses_during_an_update", "check_ready"),
    (TakesHalfUpdates, "test_it_refuses_after_a_first_update_that_lacked_a_parameter", "completeness"),
    (CountsVersionsItself, "test_every_token_carries_the_version_of_its_weights", "begin_update"),
    (OwnNames, "test_the_layout_has_the_canonical_names_and_shapes", "safetensors"),
    (PaddedVocabulary, "test_the_layout_has_the_canonical_names_and_shapes", "padded"),
    (OneSeedForAll, "test_a_seed_gives_the_same_tokens_and_another_seed_others", "Request.seed"),
    (KeepsAGenerator, "test_a_seed_gives_the_same_tokens_and_another_seed_others", "generator"),
    (SeedsBySlot, "test_tokens_do_not_depend_on_the_rest_of_the_batch", "slot"),
    (NoTemperature, "test_first_tokens_are_distributed_as_the_model_says", "temperature"),
    (OneSeedForAll, "test_first_tokens_are_distributed_as_the_model_says", "standard deviations"),
    (RepeatsItsDraw, "test_second_tokens_are_distributed_as_the_model_says_after_the_first", "one uniform number"),
    (IgnoresFilters, "test_filtered_tokens_are_distributed_over_what_is_left", "top_k"),
    (TooNarrowNucleus, "test_filtered_tokens_are_distributed_over_what_is_left", "smallest set"),
    (IgnoresMinP, "test_filtered_tokens_are_distributed_over_what_is_left", "min_p"),
    (MinPAfterTheNucleus, "test_the_nucleus_is_of_what_min_p_leaves", "min_p comes first"),
    (IgnoresBiases, "test_a_bias_is_added_to_the_logits_before_the_temperature", "not passed on"),
    (BiasesAfterTheTemperature, "test_a_bias_is_added_to_the_logits_before_the_temperature", "after the temperature"),
    (BiasesAfterTopK, "test_a_bias_is_added_to_the_logits_before_the_temperature", "after top_k"),
    (IgnoresBiases, "test_greedy_tokens_follow_each_requests_own_biases", "leaves biases out"),
    (OneBiasForAll, "test_greedy_tokens_follow_each_requests_own_biases", "used for another"),
    (DropsTheStopToken, "test_responses_end_at_the_limit_or_at_a_stop_token", "part of it"),
    (GoesOnAfterAStop, "test_responses_end_at_the_limit_or_at_a_stop_token", "stop"),
    (SaysLengthAtTheLimit, "test_a_stop_token_at_the_limit_is_a_stop", "before the limit"),
    (LosesOne, "test_every_request_is_answered_once", "one completion"),
    (AnswersTwice, "test_every_request_is_answered_once", "twice"),
    (GivesThemAsTheyCome, "test_every_request_is_answered_once", "order of the requests"),
    (WideArrays, "test_completions_have_one_entry_for_each_token", "float32"),
    (FailsOnNothing, "test_no_requests_give_no_completions", "empty"),
    (PrefixAsPrompt, "test_a_prefix_is_gone_on_from", "prompt"),
    (OwnSeedAfterAPrefix, "test_a_sampled_response_cut_and_gone_on_with_is_the_uncut_one", "position"),
    (DropsAborted, "test_aborted_requests_are_answered_too", "dropped"),
    (NeverAborts, "test_aborted_requests_are_answered_too", "abort does nothing"),
    (DropsWhatItLent, "test_lent_storage_needs_no_update_and_survives_sleep", "lost"),
    (WakesToNoise, "test_it_speaks_again_after_sleep", "same tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "method", "says"), FAULTS, ids=[f"{f.__name__}-{m}" for f, m, _ in FAULTS])
def test_the_fault_is_noticed(fault, method, says):
    with one_rank() as context:

        def start(spec):
            engine = fault(spec, TransformersEngineConfig(), context)
            engine.start()
            return engine

        caught(Kit, method, says, start=start)


def test_each_invariant_has_a_fault():
    invariants = {m for m in dir(RolloutEngineConformance) if m.startswith("test_")}
    assert invariants == {method for _, method, _ in FAULTS}


def test_what_an_engine_cannot_do_is_skipped():
    class Plain(Kit):
        aborts = sleeps = prefixes = filters = biases = boxes = False

    for method in (
        "test_a_prefix_is_gone_on_from",
        "test_aborted_requests_are_answered_too",
        "test_the_nucleus_is_of_what_min_p_leaves",
        "test_greedy_tokens_follow_each_requests_own_biases",
    ):
        with pytest.raises(pytest.skip.Exception):
            getattr(Plain(), method)(start=None)
