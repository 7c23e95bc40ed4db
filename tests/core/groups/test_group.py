"""Worker groups, on both runtimes: equal results and errors, data by reference, overlap by data dependency."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.batches import plain

from hybridflow.core.contracts.protocol import Protocol, SplitProtocol
from hybridflow.core.contracts.worker import RankContext, Worker, register
from hybridflow.core.errors import HybridFlowError, WorkerError
from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout, generation_layout


class Reversed(SplitProtocol):
    """The last rank gets the first part."""

    name = "REVERSED"

    def parts(self, group):
        return group.layout.world

    def part_of(self, group, rank):
        return group.layout.world - 1 - rank

    source_of = part_of


def double(x):
    """A function of a module that workers may not be able to import."""
    return x * 2


class Calls(Worker):
    """Everything that a method can take and return."""

    def __init__(self, context: RankContext, offset: float = 0.0):
        super().__init__(context)
        self.offset, self.kept = offset, None
        if offset < 0:
            raise ValueError("offset must not be negative")

    @register(Protocol.THREE_D, writes=("y", "who"))
    def add(self, batch: Batch, amount: float = 1.0) -> Batch:
        y = batch["x"].values + amount + self.offset
        return Batch(
            {"y": y, "who": [self.rank] * batch.rows},
            Metrics({"sum": (float(y.sum()), batch.rows)}),
        )

    @register(Protocol.THREE_D)
    def echo(self, batch: Batch) -> Batch:
        return batch

    @register(Protocol.THREE_D, same_rows=False)
    def only_even(self, batch: Batch) -> Batch:
        return batch.take(batch["x"].values.view(-1) % 2 == 0)

    @register(Protocol.THREE_D)
    def loses_a_row(self, batch: Batch) -> Batch:
        return batch.take(slice(1, None))

    @register(Protocol.THREE_D, reads=("x",))
    def names(self, batch: Batch) -> list[str]:
        return sorted(batch.names)

    @register(Protocol.THREE_D)
    def measure(self, batch: Batch) -> Metrics:
        return Metrics({"x": (float(batch["x"].values.sum()), batch.rows)}, {"rank": self.rank})

    @register(Protocol.THREE_D)
    def pairs(self, pairs: list[tuple[Batch, float]], more: dict[str, Batch]) -> Batch:
        total = sum(batch["x"].values * weight for batch, weight in pairs)
        return Batch({"x": total + more["x"]["x"].values})

    @register(Protocol.ONE_TO_ALL)
    def who(self) -> tuple[int, int, int]:
        return self.rank, self.context.world_size, os.getpid()

    @register(Protocol.RANK_ZERO)
    def first(self, f, x) -> tuple:
        return self.rank, f(x)

    @register(Protocol.ALL_TO_ALL)
    def own(self, number: int) -> int:
        return number * 10 + self.rank

    @register(Protocol.MICRO_DP)
    def generate(self, batch: Batch) -> Batch:
        return Batch({"rank": torch.full((batch.rows,), self.rank)})

    @register(Reversed)
    def backwards(self, batch: Batch) -> Batch:
        return Batch({"x": batch["x"].values, "rank": torch.full((batch.rows,), self.rank)})

    @register(Protocol.ONE_TO_ALL)
    def keep(self, batch: Batch) -> None:
        self.kept = batch["x"].values

    @register(Protocol.ONE_TO_ALL)
    def spoil(self) -> float:
        self.kept.fill_(-1)
        return float(self.kept.sum())

    @register(Protocol.THREE_D)
    def lend(self, batch: Batch) -> Batch:
        self.kept = batch["x"].values
        return Batch({"x": self.kept})

    @register(Protocol.THREE_D)
    def fail(self, batch: Batch, rank: int) -> Batch:
        if self.rank == rank:
            raise KeyError("no such unit")
        return batch

    @register(Protocol.THREE_D)
    def fail_plainly(self, batch: Batch, rank: int) -> int:
        if self.rank == rank:
            raise HybridFlowError("the reward is not finite; look at the data")
        return 1

    @register(Protocol.RANK_ZERO)
    def fail_because_of_others(self):
        try:
            {}["theirs"]
        except KeyError as error:
            raise HybridFlowError("the reward raised") from error

    @register(Protocol.ONE_TO_ALL)
    def unpicklable(self):
        return threading.Lock()

    @register(Protocol.THREE_D)
    def not_a_batch(self, batch: Batch) -> Batch:
        return 3

    @register(Protocol.THREE_D, writes=("slow",))
    def wait_for(self, batch: Batch, flag: str) -> Batch:
        for _ in range(3000):
            if Path(flag).exists():
                return Batch({"slow": batch["x"].values})
            time.sleep(0.01)
        raise TimeoutError(flag)


@pytest.fixture(scope="module")
def two(launch):
    return WorkerGroup(Calls, launch(2), name="two")


@pytest.fixture(scope="module")
def other(launch):
    return WorkerGroup(Calls, launch(2, "other"), 10.0, name="other")


def batch_of(rows, **more):
    return Batch({"x": torch.arange(rows, dtype=torch.float32).view(-1, 1), **more})


def test_a_future_is_asked_for_once_and_keeps_its_answer_but_not_a_failure():
    answers = iter(["first", "second"])
    future = Future(lambda: next(answers))
    assert [future.result(), future.result()] == ["first", "first"]

    def fails():
        raise WorkerError("it was killed", role="two", phase="add", rank=0)

    failed = Future(fails)
    for _ in range(2):
        with pytest.raises(WorkerError, match="it was killed"):
            failed.result()


@pytest.mark.parametrize("rows", [5, 2, 1, 0, 4000])
def test_a_batch_is_split_over_the_ranks_and_comes_back_in_order(two, rows):
    out = two.add(batch_of(rows), amount=2.0)
    assert out.rows == rows and out.names == ("y", "who")
    assert plain(out["y"]) == [[n + 2.0] for n in range(rows)]
    assert out["who"].values == [0] * ((rows + 1) // 2) + [1] * (rows // 2)
    assert out.metrics.means["sum"] == (sum(n + 2.0 for n in range(rows)), rows)


def test_results_of_one_group_go_to_another_by_reference(two, other):
    ids = tokens([list(range(n % 5)) for n in range(3001)])
    batch = batch_of(3001, ids=ids, meta=[{"n": n} for n in range(3001)])
    made = two.echo(batch).rename(x="a").take(slice(None, None, 3)).rename(a="x")
    out = other.add(made).join(made)
    assert plain(out["y"]) == [[n + 11.0] for n in range(0, 3001, 3)]
    assert plain(out["ids"]) == [list(range(n % 5)) for n in range(0, 3001, 3)]
    assert [m["n"] for m in out["meta"].values] == list(range(0, 3001, 3))


def test_a_method_may_drop_rows_if_it_says_so(two):
    out = two.add(two.only_even(batch_of(9)))
    assert plain(out["y"]) == [[n + 1.0] for n in (0, 2, 4, 6, 8)] and out.rows == 5
    with pytest.raises(HybridFlowError, match=r"returned 4 rows for 5; .*same_rows=False"):
        two.loses_a_row(batch_of(9))["x"]


def test_what_is_no_batch_is_a_future(two):
    future = two.measure(batch_of(5))
    assert isinstance(future, Future)
    assert future.result().means == {"x": (10.0, 5.0)} and future.result().maxima == {"rank": 1.0}
    assert two.who().result()[1][:2] == (1, 2)
    assert two.first(double, 4).result() == (0, 8)
    assert two.first(lambda x: x - 1, 4).result() == (0, 3)
    assert two.own([1, 2]).result() == [10, 21]
    assert two.keep(batch_of(1)).result() == [None, None]


def test_batches_inside_lists_tuples_and_dicts_are_split_too(two):
    out = two.pairs([(batch_of(5), 1.0), (batch_of(5), 2.0)], more={"x": batch_of(5)})
    assert plain(out["x"]) == [[4.0 * n] for n in range(5)]


def test_only_the_columns_that_a_method_reads_are_sent(two):
    assert two.names(batch_of(4, ids=tokens([[1]] * 4), meta=[None] * 4)).result() == [["x"], ["x"]]


def test_generation_replicas_and_protocols_of_ones_own_decide_who_works(launch):
    layout = ParallelLayout(tp=2)
    group = WorkerGroup(
        Calls, launch(2), layout=layout, generation=generation_layout(layout, tp=1), name="tp"
    )
    assert group.add(batch_of(3))["who"].values == [0] * 3
    assert plain(group.generate(batch_of(3))["rank"]) == [0, 0, 1]
    assert plain(group.backwards(batch_of(3))["rank"]) == [1, 1, 0]
    assert plain(group.backwards(batch_of(3))["x"]) == [[0], [1], [2]]
    group.close()


def test_writing_to_a_read_tensor_changes_nobody_elses_data(two, other):
    for rows in (4, 5000):
        mine = batch_of(rows)
        expected = plain(mine["x"])
        there = two.lend(mine)
        other.keep(there).result()
        there["x"].values.zero_()  # the controller
        assert other.spoil().result() == [-rows, -rows] and two.spoil().result()  # both ends
        assert plain(mine["x"]) == expected
        assert plain(there.take(slice(None))["x"]) == expected
        assert plain(other.echo(there)["x"]) == expected


def test_an_error_says_role_phase_rank_and_shows_the_workers_traceback(two):
    with pytest.raises(WorkerError) as error:
        two.fail(batch_of(4), 1)["x"]
    assert (error.value.role, error.value.phase, error.value.rank) == ("two", "fail", 1)
    assert "KeyError: 'no such unit' [role 'two', phase 'fail', rank 1]" in str(error.value)
    assert 'raise KeyError("no such unit")' in error.value.remote_traceback
    with pytest.raises(WorkerError, match=r"look at the data \[role 'two'"):
        two.fail_plainly(batch_of(4), 0).result()
    assert two.who().result()[0][0] == 0  # and it goes on


def test_of_a_message_to_the_user_only_the_code_that_it_tells_of_is_shown(two):
    with pytest.raises(WorkerError) as error:
        two.fail_plainly(batch_of(4), 0).result()
    assert error.value.remote_traceback == ""
    with pytest.raises(WorkerError, match="the reward raised") as error:
        two.fail_because_of_others().result()
    assert "KeyError: 'theirs'" in error.value.remote_traceback
    assert "HybridFlowError" not in error.value.remote_traceback


def test_a_rank_that_fails_fails_the_call_even_if_its_result_does_not_count(launch):
    group = WorkerGroup(Calls, launch(2), layout=ParallelLayout(tp=2), name="tp")
    with pytest.raises(WorkerError, match="rank 1"):
        group.fail(batch_of(4), 1)["x"]
    with pytest.raises(WorkerError, match="rank 1"):
        group.fail_plainly(batch_of(4), 1).result()
    assert plain(group.fail(batch_of(1), 7)["x"]) == [[0]]
    group.close()


def test_an_error_reaches_whoever_uses_the_result_as_the_same_error(two, other):
    out = other.add(two.echo(two.fail(batch_of(4), 0)))
    with pytest.raises(WorkerError) as error:
        out["y"]
    assert (error.value.role, error.value.phase, error.value.rank) == ("two", "fail", 0)
    with pytest.raises(WorkerError, match="phase 'fail', rank 0"):
        other.measure(two.fail(batch_of(4), 0)).result()
    with pytest.raises(WorkerError, match="phase 'fail', rank 0"):
        _ = two.fail(batch_of(4), 0).metrics


def test_a_constructor_that_fails_is_an_error_of_that_role(launch):
    with pytest.raises(
        WorkerError,
        match=r"role 'negative', .*rank 0\]",
    ):
        WorkerGroup(Calls, launch(2), -1.0, name="negative")


def test_results_that_cannot_be_sent_or_are_no_batch_are_errors_of_the_method(two):
    with pytest.raises(WorkerError, match=r"pickle.*phase 'unpicklable', rank 0"):
        two.unpicklable().result()
    with pytest.raises(HybridFlowError, match=r"'not_a_batch' .* returned int"):
        two.not_a_batch(batch_of(2))["x"]


def test_arguments_that_cannot_be_sent_are_errors_before_any_rank_starts(two):
    with pytest.raises(TypeError, match="pickle"):
        two.own([1, threading.Lock()])
    assert two.own([1, 2]).result() == [10, 21]
    with pytest.raises(HybridFlowError, match="each of the 2 ranks, got 3 entries"):
        two.own([1, 2, 3])


def test_groups_and_methods_that_cannot_be_are_refused(launch, two):
    with pytest.raises(HybridFlowError, match=r"has 4 ranks, and its pool 'main' has 2 devices"):
        WorkerGroup(Calls, launch(2), layout=ParallelLayout(dp=4))
    with pytest.raises(AttributeError, match="no method 'nope'"):
        two.nope()

    class Shadows(Worker):
        @register()
        def close(self) -> int: ...

    with pytest.raises(HybridFlowError, match="Shadows registers 'close'"):
        WorkerGroup(Shadows, launch(2))


def test_groups_of_one_pool_share_its_processes(launch, two):
    neighbour = WorkerGroup(Calls, launch(2), name="neighbour")
    assert [pid for *_, pid in neighbour.who().result()] == [pid for *_, pid in two.who().result()]
    neighbour.close()


def test_a_call_waits_for_the_results_that_it_uses_and_for_no_others(two, other, tmp_path):
    flag = tmp_path / "go"
    batch = batch_of(4)
    slow = two.wait_for(batch, str(flag))
    late = other.add(batch, 5.0)
    assert plain(late["y"]) == [[n + 15.0] for n in range(4)]  # while `slow` is under way
    assert other.names(batch.join(slow.select(["slow"]))).result() == [
        ["x"],
        ["x"],
    ]  # reads x alone
    assert not flag.exists()
    flag.touch()
    assert plain(slow["slow"]) == plain(batch["x"])


def test_bytes_through_the_controller_are_counted_and_few(two, other, runtime):
    rows = 40_000  # each rank's half is an object of its own, so nothing else comes with it
    x = torch.rand(rows, 16)
    made = two.echo(Batch({"x": x}))
    runtime.traffic.take()
    for _ in range(3):
        made = other.add(made).rename(y="x").select(["x"])
    metrics = other.measure(made).result()
    moved = runtime.traffic.take()
    assert metrics.means["x"][1] == rows
    assert moved["fetched"] == 0 and 0 < moved["sent"] < 8000 and 0 < moved["received"] < 2000
    made["x"]
    moved = runtime.traffic.take()
    assert moved["fetched"] == x.nbytes and moved["sent"] == 0


def test_many_small_steps_leave_nothing_behind(two, other, runtime, runtime_name):
    batch = Batch(
        {f"c{i}": torch.zeros(16, 64) for i in range(4)} | {"x": torch.zeros(16, 512)}
    )  # 24 KB a rank

    def steps(count):
        made = batch
        for _ in range(count):
            made = two.echo(made)  # a chain that nobody reads
            out = other.add(made)
            two.measure(out.rename(y="x"))  # nobody asks
            out["y"]

    def memory():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    steps(50)
    before = memory()
    steps(1000 if runtime_name == "inline" else 250)
    assert memory() - before < 15e6
    if runtime_name == "ray":
        held = two.echo(batch)
        held["x"]
        assert objects_in_the_store() >= 2
        del held
        two.who().result()
        deadline = time.monotonic() + 5
        while objects_in_the_store() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert objects_in_the_store() == 0
        assert len(runtime.calls) <= 32


def objects_in_the_store():
    import ray
    from ray._private.internal_api import memory_summary

    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    return int(re.search(r"Plasma memory usage \S+ MiB, (\d+) objects", text).group(1))
