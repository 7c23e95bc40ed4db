"""Where a rank is, which ranks it meets, and what `register` notes of a method."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.worker import (
    COLLECTIVE_TIMEOUT,
    EVERY_AXIS,
    RankContext,
    Worker,
    register,
)
from hybridflow.core.groups.methods import methods_of
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.parallel import Coords, ParallelLayout, generation_layout

CPU = torch.device("cpu")


def context(rank: int = 0, **sizes: int) -> RankContext:
    return RankContext("actor", rank, ParallelLayout(**sizes), CPU)


@pytest.fixture(params=[0, 5])
def rank(request):
    """One of eight ranks, whose groups are made and never meet: torch's own stand-in for a backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


def test_a_rank_knows_its_place():
    here = context(5, tp=2, dp=3)
    assert here.world_size == 6
    assert here.coords == Coords(tp=1, cp=0, pp=0, dp=2)
    assert Worker(here).rank == 5


def test_a_rank_is_in_the_group_of_those_that_differ_in_the_axes_alone(rank):
    layout = ParallelLayout(pp=2, tp=2, dp=2)
    here = RankContext(
        "actor", rank, layout, CPU, generation=generation_layout(ParallelLayout(tp=4, dp=2), tp=2)
    )
    members = {
        axis: dist.get_process_group_ranks(here.group(axis))
        for axis in ("tp", "pp", "dp", "tp-pp", "generation.tp")
    }
    expected = {
        0: {
            "tp": [0, 1],
            "pp": [0, 2],
            "dp": [0, 4],
            "tp-pp": [0, 1, 2, 3],
            "generation.tp": [0, 2],
        },
        5: {
            "tp": [4, 5],
            "pp": [5, 7],
            "dp": [1, 5],
            "tp-pp": [4, 5, 6, 7],
            "generation.tp": [5, 7],
        },
    }
    assert members == expected[rank]
    assert here.group("cp") is None
    assert len(dist.get_process_group_ranks(here.group(EVERY_AXIS))) == 8


def test_a_group_is_made_once(rank):
    here = context(rank, dp=8)
    assert here.group("dp") is here.group("dp")


def test_its_groups_wait_as_long_as_the_process_says(rank, monkeypatch):
    waits, make = [], dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, timeout: (waits.append(timeout), make(ranks))[1]
    )
    here = context(rank, dp=8)
    here.shared[COLLECTIVE_TIMEOUT] = timedelta(seconds=7)
    here.group("dp")
    assert set(waits) == {timedelta(seconds=7)}


def test_a_rank_alone_needs_no_group_and_sums_its_own():
    alone = context()
    assert alone.group("dp") is None
    assert alone.sum([1.5, 2.0]) == [1.5, 2.0]
    assert alone.max([3.0], EVERY_AXIS) == [3.0]


def test_groups_where_the_runtime_gives_none_are_an_error_that_says_what_to_use():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"'actor' .* use runtime=ray"):
        context(dp=2).sum([1.0])


def test_values_are_reduced_over_the_ranks_of_an_axis_in_float64():
    store = dist.HashStore()
    third = 1 / 3

    def work(rank: int) -> tuple[list[float], ...]:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        here = RankContext(
            "actor", rank, ParallelLayout(dp=2), CPU, groups={"dp": group, "tp": None}
        )
        values = [[1.0, third], [5.0, 1e16]][rank]
        return here.sum(values), here.max(values), here.sum(values, "tp"), here.sum([])

    with ThreadPoolExecutor(2) as threads:  # two ranks in one process, so that none is started
        first, second = threads.map(work, range(2))
    assert first == ([6.0, third + 1e16], [5.0, 1e16], [1.0, third], [])
    assert second == ([6.0, third + 1e16], [5.0, 1e16], [5.0, 1e16], [])


def test_what_is_registered_is_noted_and_the_method_stays_as_it_is():
    class Doubling(Worker):
        @register()
        def plain(self, batch: Batch) -> Batch:
            return batch

        @register("RANK_ZERO", same_rows=False, reads=("x",), writes=["y"])
        def one(self, value):
            return 2 * value

        def unregistered(self): ...

    doubling = Doubling(context())
    assert doubling.one(4) == 8
    doubling.close()
    methods = methods_of(Doubling)
    assert sorted(methods) == ["one", "plain"]
    assert methods["plain"].protocol is Protocol.THREE_D
    assert methods["plain"].same_rows
    assert methods["plain"].columns((), {}) is None
    assert methods["one"].protocol is Protocol.RANK_ZERO
    assert not methods["one"].same_rows
    assert methods["one"].promised((), {}) == ("y",)
    assert list(methods["one"].columns((), {})) == ["x"]
