"""What a machine does per second: figures of a rank alone, and of two that talk to each other."""

from __future__ import annotations

import os
import time

import pytest
import torch

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.planner.calibration.machine import ROUNDS, MachineFigures, MachineProbe


def probe(rank: int = 0, world: int = 1) -> MachineProbe:
    return MachineProbe(RankContext("machine", rank, ParallelLayout(dp=world), torch.device("cpu")))


def measured(rank: int, world: int) -> MachineFigures:
    return probe(rank, world).measure("float32")


def seconds_of(work) -> float:
    """The best of some calls."""
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def test_one_rank_has_the_whole_machine_and_no_link():
    found = measured(0, 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (found.name, found.memory_bytes) == ("cpu", pytest.approx(memory))
    assert (found.link_rate, found.link_latency) == (None, 0.0)

    a = torch.randn(512, 512)
    flops = 2 * 512**3 / seconds_of(lambda: a @ a)
    assert (
        flops / 20 < found.flops < 20 * flops
    )  # the machine is shared, and the matrices are others
    b = torch.zeros(1 << 22)
    rate = 2 * b.nbytes / seconds_of(b.clone)
    assert rate / 30 < found.memory_rate < 30 * rate


def test_two_ranks_share_the_memory_and_have_a_link(ranks):
    first, second = ranks(measured, 2)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for found in (first, second):
        assert found.memory_bytes == pytest.approx(memory / 2)
        assert 1e6 < found.link_rate < 1e12
        assert 1e-7 < found.link_latency < 0.5


def test_the_best_of_some_rounds_counts_for_one_call():
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        time.sleep(
            0.02 if len(calls) <= 4 else 0.002
        )  # the first, and the whole of the first round

    taken = probe()._best(work, times=3)
    assert len(calls) == 1 + 3 * ROUNDS
    assert 0.002 <= taken < 0.02
