"""RuntimeConformance: calls arrive in order, results travel by value or by reference, failures say where they were."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hybridflow.core.contracts.runtime import Runtime
from hybridflow.core.errors import WorkerDied, WorkerError
from hybridflow.core.groups.group import WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.kit.testing.checks import missing_fixture, require, require_raises
from hybridflow.kit.testing.probe import LARGE, Probe, probe_groups


class RuntimeConformance:
    """Give a fixture `runtime`: your Runtime, started; of any scope (module is cheapest), shut down by you."""

    collectives = True
    """Whether the ranks of a pool have a torch.distributed group."""
    processes = True
    """Whether each rank is a process of its own: pools run side by side, and may be killed."""

    @pytest.fixture
    def runtime(self) -> Runtime:
        return missing_fixture(self, "runtime", "your Runtime, started")

    @pytest.fixture
    def groups(self, runtime) -> Callable[..., WorkerGroup]:
        """A function (name, ranks) -> a group of fresh Probes."""
        return probe_groups(runtime)

    def test_results_come_back_from_every_rank(self, groups):
        found = groups("probe", ranks=2).note(4).result()
        require(
            found == [40, 41],
            got=f"{found} from two ranks",
            expected="[40, 41]: one result per rank, in their order",
            likely="launch gives processes in another order, or one process for both ranks",
        )

    def test_calls_run_in_the_order_in_which_they_were_sent(self, groups):
        group = groups()
        for number in range(12):
            group.note(number, 0.02 if number == 0 else 0.0)
        found = group.noted().result()
        require(
            found == list(range(12)),
            got=f"calls ran in order {found}",
            expected="the order sent: an update comes before the generation after it",
            likely="a process runs messages in several threads",
        )

    def test_rows_are_split_and_come_back_in_order(self, groups):
        group = groups("probe", ranks=2)
        for rows in (8, 7, 1):
            doubled = group.double(Batch({"x": torch.arange(float(rows))}))
            found = torch.as_tensor(doubled["x"].values).tolist()
            require(
                found == [2.0 * i for i in range(rows)]
                and doubled.metrics["sum"] == (rows - 1) / 2,
                got=f"{found}, metrics {doubled.metrics!r}",
                expected=f"each of {rows} rows doubled, in order; metrics of both ranks merged",
                likely="replies are mixed up between ranks",
            )

    def test_a_result_goes_to_another_pool_by_reference(self, groups, runtime):
        first, second = groups("first"), groups("second")
        rows = LARGE // 10
        runtime.traffic.take()
        total = second.total(first.make(rows)).result()
        traffic = runtime.traffic.take()
        n = rows * 10
        require(
            total == [n * (n - 1) / 2],
            got=f"the sum of a column made in one pool and read in another is {total}",
            expected=f"[{n * (n - 1) / 2}]",
            likely="a reply that is an argument of another call is not delivered before that call starts",
        )
        require(
            0 < sum(traffic.values()) < 40_000,
            got=f"{traffic} bytes through the controller for a column of {4 * n} bytes",
            expected="messages of some kB, counted in runtime.traffic",
            likely="the store keeps columns inside the reply, so that they travel through the controller",
        )

    def test_what_the_controller_reads_is_counted(self, groups, runtime):
        made = groups().make(LARGE // 10)
        runtime.traffic.take()
        found = torch.as_tensor(made["x"].values)
        traffic = runtime.traffic.take()
        require(
            found.shape == (LARGE // 10, 10)
            and float(found[-1, -1]) == LARGE - 1
            and traffic["fetched"] >= 4 * LARGE,
            got=f"a column of shape {tuple(found.shape)}, traffic {traffic}",
            expected=f"the column, and at least {4 * LARGE} bytes under `fetched`",
            likely="get gives another block, or columns travel inside replies",
        )

    def test_writing_in_place_changes_nobody_elses_rows(self, groups):
        first, second = groups("first"), groups("second")
        for rows in (LARGE // 10, 20):
            made = first.make(rows)
            expected = float(np.arange(rows * 10, dtype=np.float64).sum())
            second.write_into(made).metrics  # noqa: B018  (waits)
            first.scribble().result()
            found = second.total(made).result()
            require(
                found == [expected],
                got=f"a column of {rows} rows sums to {found} after its maker and a reader wrote to their tensors",
                expected=f"[{expected}]: a result is what was returned",
                likely="blocks share memory with a worker's tensors: copy in put, and give read-only or copied arrays "
                "in get",
            )

    def test_a_failure_says_where_it_was(self, groups):
        group = groups("probe", ranks=2)
        error = require_raises(
            lambda: group.fail(1).result(),
            WorkerError,
            what="a call that raised on rank 1",
            likely="Host.call never raises; the runtime must bring its reply back",
        )
        text = str(error)
        require(
            error.role == "probe"
            and error.phase == "fail"
            and error.rank == 1
            and "no such unit" in text
            and "KeyError" in text,
            got=f"role {error.role!r}, phase {error.phase!r}, rank {error.rank}, text {text!r:.200}",
            expected="role 'probe', phase 'fail', rank 1, and what was raised with its traceback",
            likely="the error is wrapped or replaced on its way",
        )
        try:
            again = group.note(1).result()
        except Exception as failure:
            again = failure
        require(
            again == [10, 11],
            got=f"{again!r:.200} from the next call to the group",
            expected="a process outlives a failed call",
            likely="the process ends with the exception",
        )

    def test_the_first_failure_of_a_chain_is_the_one_that_is_told(self, groups):
        first, second = groups("first"), groups("second")
        chained = second.double(second.double(first.fail_on(Batch({"x": torch.arange(3.0)}))))
        error = require_raises(
            lambda: chained["x"],
            WorkerError,
            what="reading what depends on a failed call",
            likely="a failed reply is delivered as a value",
        )
        require(
            error.role == "first" and error.phase == "fail_on",
            got=f"role {error.role!r}, phase {error.phase!r}",
            expected="role 'first', phase 'fail_on': where it began",
            likely="the error of a reply is wrapped by the call that needed it",
        )

    def test_a_result_that_cannot_be_sent_is_an_error(self, groups):
        error = require_raises(
            lambda: groups().unsendable().result(),
            WorkerError,
            what="a generator as a result",
            likely="pickling fails outside Host.call, and the controller waits for ever",
        )
        require(
            "generator" in str(error),
            got=f"{str(error)!r:.200}",
            expected="what could not be sent",
            likely="the cause is dropped",
        )

    def test_a_group_can_be_closed_and_its_pool_used_again(self, groups, runtime):
        group = groups("first")
        group.close()
        again = WorkerGroup(Probe, group.pool, name="two")
        require(
            again.noted().result() == [],
            got="a new group in the pool of a closed one that does not work",
            expected="processes outlive their workers",
            likely="closing a group ends the pool's processes",
        )

    def test_ranks_of_a_pool_have_collectives(self, groups):
        if not self.collectives:
            pytest.skip("its ranks have no torch.distributed group")
        found = groups("probe", ranks=2).sum_of_ranks().result()
        require(
            found == [3.0, 3.0],
            got=f"an all-reduce over two ranks of 1 and 2 gave {found}",
            expected="[3.0, 3.0]",
            likely="launch did not let each Host join the pool's group",
        )

    def test_pools_run_side_by_side(self, groups):
        if not self.processes:
            pytest.skip("its pools share a process")
        first, second = groups("first"), groups("second")
        started = time.monotonic()
        for future in (first.note(1, 1.5), second.note(2, 1.5)):
            future.result()
        spent = time.monotonic() - started
        require(
            spent < 2.8,
            got=f"two calls of 1.5 s in two pools took {spent:.1f} s",
            expected="about 1.5 s",
            likely="submit waits for the call, or pools share a process",
        )

    # The last two: a runtime may refuse everything once a pool is stuck or a process gone, since a run ends then.
    def test_a_failure_is_told_while_other_ranks_wait_for_the_failed_one(self, groups):
        if not self.collectives:
            pytest.skip("its ranks have no torch.distributed group")
        group = groups("waiting", ranks=2)
        groups("doomed")  # of the next test: it starts while all is well
        started = time.monotonic()
        error = require_raises(
            lambda: group.fail_while_others_wait().result(),
            WorkerError,
            what="a call in which rank 1 raised and rank 0 waits for it",
            likely="replies are waited for one after the other: look at all of them while one does not come",
        )
        require(
            error.rank == 1 and "no such unit" in str(error) and time.monotonic() - started < 120,
            got=f"rank {error.rank}, {str(error)!r:.200}, after {time.monotonic() - started:.0f} s",
            expected="what rank 1 raised, soon",
            likely="the first error is that of a collective which ran into its time limit",
        )

    def test_a_process_that_dies_is_an_error_with_its_place(self, groups):
        if not self.processes:
            pytest.skip("its ranks live in the controller's process")
        group = groups("doomed")
        error = require_raises(
            lambda: group.end_the_process().result(),
            WorkerDied,
            what="a call whose process was killed",
            likely="wait does not look at the process, and would wait for ever",
        )
        require(
            error.role == "doomed" and error.phase == "end_the_process",
            got=f"role {error.role!r}, phase {error.phase!r}",
            expected="role 'doomed', phase 'end_the_process'",
            likely="the label that submit got is not kept with the reference",
        )
