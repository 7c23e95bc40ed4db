"""Every invariant of EngineRequests notices the fault that it is for."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from helpers.expect import each_fault
from helpers.faulty_engines import Broken, caught_in_engine, starter, with_sampling

from hybridflow.kit.testing.engine_requests import EngineRequests


class DropsTheStopToken(Broken):
    def answered(self, completion, request):
        n = len(completion.response_ids) - (completion.finish_reason == "stop")
        names = ("response_ids", "logprobs", "weight_version")
        return attrs.evolve(completion, **{name: getattr(completion, name)[:n] for name in names})


class GoesOnAfterAStop(Broken):
    def asked(self, request):
        return with_sampling(request, stop_token_ids=())


class SaysLengthAtTheLimit(Broken):
    def answered(self, completion, request):
        full = len(completion.response_ids) == request.sampling.max_tokens
        return attrs.evolve(completion, finish_reason="length") if full else completion


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
        return attrs.evolve(completion, logprobs=completion.logprobs.astype(np.float64))


class FailsOnNothing(Broken):
    def submit(self, requests):
        return iter([*super().submit(requests)][:1]) if requests else iter([None])


class PrefixAsPrompt(Broken):
    def asked(self, request):
        if request.prefix_ids is None:
            return request
        prompt = np.append(request.prompt_ids, request.prefix_ids)
        without = dict.fromkeys(("prefix_ids", "prefix_logprobs", "prefix_versions"))
        return attrs.evolve(request, prompt_ids=prompt, **without)


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


FAULTS = {
    "test_responses_end_at_the_limit_or_at_a_stop_token": [DropsTheStopToken, GoesOnAfterAStop],
    "test_a_stop_token_at_the_limit_is_a_stop": [SaysLengthAtTheLimit],
    "test_every_request_is_answered_once": [LosesOne, AnswersTwice, GivesThemAsTheyCome],
    "test_completions_have_one_entry_for_each_token": [WideArrays],
    "test_no_requests_give_no_completions": [FailsOnNothing],
    "test_a_prefix_is_gone_on_from": [PrefixAsPrompt],
    "test_a_sampled_response_cut_and_gone_on_with_is_the_uncut_one": [OwnSeedAfterAPrefix],
    "test_aborted_requests_are_answered_too": [DropsAborted, NeverAborts],
    "test_lent_storage_needs_no_update_and_survives_sleep": [DropsWhatItLent],
    "test_it_speaks_again_after_sleep": [WakesToNoise],
}


@each_fault(EngineRequests, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught_in_engine(EngineRequests, fault, method)


@pytest.mark.parametrize(
    ("flag", "method"),
    [
        ("prefixes", "test_a_prefix_is_gone_on_from"),
        ("prefixes", "test_a_sampled_response_cut_and_gone_on_with_is_the_uncut_one"),
        ("aborts", "test_aborted_requests_are_answered_too"),
        ("sleeps", "test_it_speaks_again_after_sleep"),
    ],
)
def test_what_an_engine_cannot_do_is_skipped(flag, method):
    kit = type("Kit", (EngineRequests,), {flag: False})()
    with pytest.raises(pytest.skip.Exception):
        getattr(kit, method)(start=None)


class LendsNothing(Broken):
    lends = False


def test_an_engine_that_lends_no_storage_skips_it():
    method = EngineRequests().test_lent_storage_needs_no_update_and_survives_sleep
    with starter(LendsNothing) as start, pytest.raises(pytest.skip.Exception, match="lends no"):
        method(start)
