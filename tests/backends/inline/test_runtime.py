"""The inline runtime: the caller's own process, and its thread where there is one rank."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.backends.inline.runtime import InlineConfig, InlineRuntime
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.groups.group import Pool, WorkerGroup


def test_what_is_put_stays_as_it_was_while_its_maker_writes_on():
    runtime = InlineRuntime()
    made = np.arange(3)
    handle = runtime.put([made, np.ones(2)])
    made[:] = 9
    numbers, ones = runtime.get(handle)
    assert numbers.tolist() == [0, 1, 2]
    assert ones.tolist() == [1.0, 1.0]


class Threads(Worker):
    @register(Protocol.ONE_TO_ALL)
    def thread(self) -> int:
        return threading.get_ident()

    @register(Protocol.ONE_TO_ALL)
    def interrupted(self) -> None:
        raise KeyboardInterrupt

    @register(Protocol.ONE_TO_ALL)
    def meet(self, barrier: str) -> int:
        return BARRIER.wait(timeout=30)


BARRIER = threading.Barrier(3)


@pytest.fixture
def inline():
    runtime = InlineRuntime()
    runtime.start()
    yield runtime
    runtime.shutdown()


def group_of(inline, world):
    return WorkerGroup(Threads, Pool.launch(ResourcePool("main", (world,)), inline))


def test_one_rank_runs_in_the_callers_thread_so_that_a_breakpoint_works(inline):
    group = group_of(inline, 1)
    assert group.thread().result() == [threading.get_ident()]
    with pytest.raises(KeyboardInterrupt):
        group.interrupted()


def test_several_ranks_have_a_thread_each_so_that_they_can_wait_for_one_another(inline):
    group = group_of(inline, 3)
    assert len({*group.thread().result(), threading.get_ident()}) == 4

    class Meets(Threads):  # threads share this module
        pass

    assert sorted(WorkerGroup(Meets, group.pool, name="meets").meet("x").result()) == [0, 1, 2]


def test_a_process_group_that_the_caller_made_is_left_alone(inline):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group_of(inline, 1)
        inline.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_its_own_process_group_ends_with_it(inline):
    group_of(inline, 1)
    assert dist.is_initialized()
    inline.shutdown()
    assert not dist.is_initialized()
    inline.shutdown()


def test_threads_of_torch_are_set_on_demand():
    before = torch.get_num_threads()
    try:
        InlineRuntime(InlineConfig(threads=before + 1)).start()
        assert torch.get_num_threads() == before + 1
        InlineRuntime().start()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
