"""Every invariant of EngineFlow notices the fault that it is for."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from helpers.expect import each_fault
from helpers.faulty_engines import Broken, caught_in_engine, starter

from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.kit.testing.engine_flow import EngineFlow


class ForgetsWhoJoined(TransformersEngine):
    def _check_none_lost(self, done):
        """An engine of others may not notice."""

    def enter(self, request):
        if self.scheduler.running:
            return
        super().enter(request)


class SeedsByArrival(TransformersEngine):
    count = 0

    def add(self, request):
        self.count += 1
        super().add(attrs.evolve(request, seed=request.seed + 50 * self.count))


class StampsAtTheEnd(Broken):
    def answered(self, completion, request):
        versions = np.full_like(completion.weight_version, self.version)
        return attrs.evolve(completion, weight_version=versions)


class BeginsAnewAfterAnUpdate(Broken):
    """The tokens of before are drawn again, by the new weights."""

    def answered(self, completion, request):
        if len(set(completion.weight_version.tolist())) < 2:
            return completion
        self._free = True
        self.running.clear()
        self._forget()
        number = self._stream_number
        [again] = list(TransformersEngine.submit(self, [request]))
        self._stream_number = number
        return attrs.evolve(again, weight_version=completion.weight_version)


class SaysItBackwards(Broken):
    """The newest token comes first."""

    def partial(self, number):
        return super().partial(number)[::-1]


FAULTS = {
    "test_requests_join_those_that_run": [ForgetsWhoJoined, SeedsByArrival],
    "test_what_a_request_has_made_so_far_is_part_of_its_completion": [SaysItBackwards],
    "test_weights_may_change_while_sequences_run": [StampsAtTheEnd, BeginsAnewAfterAnUpdate],
}


@each_fault(EngineFlow, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught_in_engine(EngineFlow, fault, method)


class Waits(Broken):
    """Takes weights between sequences alone."""

    inflight = False


def test_an_engine_that_says_it_cannot_skips_it():
    with starter(Waits) as start, pytest.raises(pytest.skip.Exception):
        EngineFlow().test_weights_may_change_while_sequences_run(start)


def test_keys_and_values_of_old_weights_are_noticed_where_they_should_be_dropped():
    class Recomputes(EngineFlow):
        recomputes = True

    method = "test_weights_may_change_while_sequences_run"
    caught_in_engine(Recomputes, TransformersEngine, method)
