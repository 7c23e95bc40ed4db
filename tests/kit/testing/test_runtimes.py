"""Every invariant that RuntimeConformance has of one process notices the fault that it is for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.expect import caught, each_fault

from hybridflow.backends.inline import runtime as inline
from hybridflow.backends.inline.runtime import InlineProcess, InlineRuntime
from hybridflow.core.contracts.runtime import Traffic
from hybridflow.core.groups.host import Host
from hybridflow.kit.testing import RuntimeConformance
from hybridflow.kit.testing.probe import probe_groups


class Kit(RuntimeConformance):
    collectives = processes = False


class BrokenRuntime(InlineRuntime):
    process: type[InlineProcess] = InlineProcess

    def launch(self, pool, device, environment):
        processes = [self.process(pool, rank) for rank in range(pool.world)]
        if pool.world == 1:
            processes[0].host.join(None, device)
        self.processes += processes
        return list(processes)


class RanksInAnotherOrder(BrokenRuntime):
    def launch(self, pool, device, environment):
        return super().launch(pool, device, environment)[::-1]


class Scrambled(InlineProcess):
    """Runs each call in a thread of its own."""

    def submit(self, message, label):
        if label.phase == "__create__":
            return super().submit(message, label)
        self.pool_of_threads = getattr(self, "pool_of_threads", None) or ThreadPoolExecutor(8)
        return self.pool_of_threads.submit(self._run, message)


class ScrambledRuntime(BrokenRuntime):
    process = Scrambled


class SharingStore(inline.InlineStore):
    def put(self, block):
        return inline.ArrayHandle(list(block))


class SharedMemory(InlineProcess):
    def __init__(self, pool, rank):
        super().__init__(pool, rank)
        self.host = Host(pool.name, rank, pool.members(rank), SharingStore())


class SharedMemoryRuntime(BrokenRuntime):
    process = SharedMemory


class CountsNothing(InlineRuntime):
    """`traffic` is thrown away."""

    @property
    def traffic(self):
        return Traffic()

    @traffic.setter
    def traffic(self, value):
        pass


class Remembered(InlineProcess):
    sent: list = []

    def submit(self, message, label):
        future = super().submit(message, label)
        if label.phase == "double":
            self.sent.append(future)
        return future


class SwapsReplies(BrokenRuntime):
    """Rank 0's reply for rank 1's, and the reverse."""

    process = Remembered

    def wait(self, reply):
        sent = Remembered.sent
        return super().wait(sent[sent.index(reply) ^ 1] if reply in sent else reply)


class TellsTheFirst(InlineRuntime):
    def first(self, replies):
        return replies[0]


class LosesErrors(BrokenRuntime):
    """A failed call is an error of the runtime's own, without its place."""

    def wait(self, reply):
        outcome = super().wait(reply)
        if b"Traceback" in bytes(outcome[0]):
            raise RuntimeError("a call failed")
        return outcome


class DropsProcesses(BrokenRuntime):
    """Ends a process with the call that failed."""

    def wait(self, reply):
        outcome = super().wait(reply)
        if b"KeyError" in bytes(outcome[0]):
            for process in self.processes:
                process.host.workers.clear()
        return outcome


FAULTS = {
    "test_results_come_back_from_every_rank": [RanksInAnotherOrder],
    "test_calls_run_in_the_order_in_which_they_were_sent": [ScrambledRuntime],
    "test_of_several_replies_one_that_is_there_is_told": [TellsTheFirst],
    "test_rows_are_split_and_come_back_in_order": [SwapsReplies],
    "test_a_result_goes_to_another_pool_by_reference": [CountsNothing],
    "test_what_the_controller_reads_is_counted": [CountsNothing],
    "test_writing_in_place_changes_nobody_elses_rows": [SharedMemoryRuntime],
    "test_a_failure_says_where_it_was": [LosesErrors, DropsProcesses],
    "test_the_first_failure_of_a_chain_is_the_one_that_is_told": [LosesErrors],
    "test_a_result_that_cannot_be_sent_is_an_error": [LosesErrors],
}
CLOSING = "test_a_group_can_be_closed_and_its_pool_used_again"
NEED_PROCESSES = {
    "test_ranks_of_a_pool_have_collectives",
    "test_pools_run_side_by_side",
    "test_a_failure_is_told_while_other_ranks_wait_for_the_failed_one",
    "test_a_process_that_dies_is_an_error_with_its_place",
    "test_processes_take_the_places_of_an_expendable_group_of_which_one_has_ended",
}
"""Tested on Ray in tests/conformance; an in-process runtime cannot break them."""


@each_fault(RuntimeConformance, FAULTS, {CLOSING, *NEED_PROCESSES})
def test_the_fault_is_noticed(fault, method):
    runtime = fault()
    runtime.start()
    fixtures = {"groups": probe_groups(runtime)}
    if "runtime" in getattr(Kit, method).__code__.co_varnames:
        fixtures["runtime"] = runtime
    try:
        caught(Kit, method, **fixtures)
    finally:
        runtime.shutdown()


@pytest.mark.parametrize("method", sorted(NEED_PROCESSES))
def test_what_needs_processes_or_collectives_is_skipped_without_them(method):
    test = getattr(Kit(), method)
    fixtures = {name: None for name in ("groups", "runtime") if name in test.__code__.co_varnames}
    with pytest.raises(pytest.skip.Exception):
        test(**fixtures)
