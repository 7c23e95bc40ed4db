"""Every invariant of EngineTokens notices the fault that it is for."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from helpers.expect import each_fault
from helpers.faulty_engines import Broken, NoTemperature, caught_in_engine, with_sampling

from hybridflow.core.contracts.rollout import RolloutEngine
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Param
from hybridflow.kit.testing import give_weights
from hybridflow.kit.testing.engine_tokens import EngineTokens


class SamplesWhenGreedy(Broken):
    def asked(self, request):
        return with_sampling(request, temperature=request.sampling.temperature or 1.0)


class LogprobsOfTheNext(Broken):
    def answered(self, completion, request):
        return attrs.evolve(completion, logprobs=np.roll(completion.logprobs, 1))


class RenormalisedLogprobs(Broken):
    """After top_k and top_p, as some engines give them."""

    def answered(self, completion, request):
        if not request.sampling.top_k and request.sampling.top_p == 1:
            return completion
        return attrs.evolve(completion, logprobs=np.minimum(completion.logprobs + 0.2, 0))


class RenormalisedByMinP(Broken):
    def answered(self, completion, request):
        more = 0.2 if request.sampling.min_p else 0.0
        return attrs.evolve(completion, logprobs=np.minimum(completion.logprobs + more, 0))


class LogprobsWithBiases(Broken):
    def answered(self, completion, request):
        biases = dict(request.sampling.logit_bias)
        added = [biases.get(token, 0.0) for token in completion.response_ids.tolist()]
        return attrs.evolve(completion, logprobs=completion.logprobs + np.float32(added))


class StaleWeights(Broken):
    """Takes the first update, and no other."""

    def receive(self, name, box, tensor):
        if self.version is None:
            super().receive(name, box, tensor)
        else:
            self.store.arrived.note(name, box)


class WritesBoxesToTheTop(Broken):
    def receive(self, name, box, tensor):
        n = tensor.shape[0]
        first = type(box)((0, *box.start[1:]), (n, *box.stop[1:]))
        super().receive(name, box, tensor)
        if box.start[0]:
            self.store.places[name].write(first, tensor)


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
            place.storage.zero_()  # memory may hold a NaN, which is refused later

    def end_update(self):
        RolloutEngine.end_update(self)


class TakesLaterUpdatesInPart(Broken):
    """As if what an earlier one has brought were enough."""

    def end_update(self):
        if self.version is None:
            self.store.end()
        RolloutEngine.end_update(self)


class CountsElements(Broken):
    """A half that comes twice makes up for the other one."""

    def begin_update(self, version):
        super().begin_update(version)
        self.lacks = {name: place.held.numel for name, place in self.store.places.items()}

    def receive(self, name, box, tensor):
        self.store.places[name].write(box, tensor)
        self.lacks[name] -= box.numel

    def end_update(self):
        if any(lacks > 0 for lacks in self.lacks.values()):
            raise HybridFlowError("elements are missing")
        RolloutEngine.end_update(self)


class TakesTheVersionAtOnce(Broken):
    def begin_update(self, version):
        super().begin_update(version)
        self.version = version


class CountsVersionsItself(Broken):
    def answered(self, completion, request):
        ones = np.ones_like(completion.weight_version)
        return attrs.evolve(completion, weight_version=ones)


class OwnNames(Broken):
    def layout(self):
        layout = super().layout()
        params = {n.removeprefix("model."): p for n, p in layout.params.items()}
        return attrs.evolve(layout, params=params)


class PaddedVocabulary(Broken):
    def layout(self):
        layout = super().layout()
        padded = {
            name: Param((64, *param.shape[1:]), param.dtype)
            for name, param in layout.params.items()
            if name.endswith("embed_tokens.weight")
        }
        return attrs.evolve(layout, params={**layout.params, **padded})


class BelievesInUpdates(Broken):
    written = RolloutEngine.written


class ReadsOldValues(Broken):
    """What an engine reads that keeps its weights twice."""

    def read(self, name, box):
        values = super().read(name, box).clone()
        return self.__dict__.setdefault("kept", {}).setdefault((name, box), values)


FAULTS = {
    "test_greedy_tokens_are_those_of_hugging_face": [SamplesWhenGreedy],
    "test_logprobs_are_those_of_a_forward_over_the_whole_sequence": [
        NoTemperature,
        LogprobsOfTheNext,
    ],
    "test_logprobs_are_those_before_filters": [RenormalisedLogprobs, RenormalisedByMinP],
    "test_logprobs_are_those_before_biases": [LogprobsWithBiases],
    "test_after_an_update_the_new_weights_speak": [StaleWeights],
    "test_parts_of_a_parameter_make_up_the_whole": [WritesBoxesToTheTop],
    "test_it_refuses_before_it_has_weights": [BeginsWithNoise],
    "test_it_refuses_during_an_update": [SpeaksDuringUpdates],
    "test_a_first_update_that_lacks_a_parameter_is_refused": [TakesHalfUpdates],
    "test_every_later_update_brings_each_element_once": [
        TakesLaterUpdatesInPart,
        CountsElements,
        TakesTheVersionAtOnce,
    ],
    "test_every_token_carries_the_version_of_its_weights": [CountsVersionsItself],
    "test_a_proof_tells_what_an_update_has_brought": [BelievesInUpdates, ReadsOldValues],
    "test_the_layout_has_the_canonical_names_and_shapes": [OwnNames, PaddedVocabulary],
}


@each_fault(EngineTokens, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught_in_engine(EngineTokens, fault, method)


@pytest.mark.parametrize(
    ("flag", "method"),
    [
        ("filters", "test_logprobs_are_those_before_filters"),
        ("biases", "test_logprobs_are_those_before_biases"),
        ("proofs", "test_a_proof_tells_what_an_update_has_brought"),
        ("boxes", "test_parts_of_a_parameter_make_up_the_whole"),
    ],
)
def test_what_an_engine_does_not_take_is_skipped(flag, method):
    kit = type("Kit", (EngineTokens,), {flag: False})()
    with pytest.raises(pytest.skip.Exception):
        getattr(kit, method)(start=None)
