"""RuntimeConformance: what the controller may take for granted about a runtime.

Calls run in order, results travel by value or by reference, and failures say where they were. All
tests call Probes (kit/testing/probe.py) in pools that one runtime starts.
"""

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
    """Subclass it and give a fixture `runtime`: your Runtime, started.

    The fixture may be of any scope (module is cheapest), and shuts the runtime down.
    """

    collectives = True
    """Whether the ranks of a pool have a torch.distributed process group."""
    processes = True
    """Whether each rank is a process of its own: pools run side by side, and may be killed."""

    replaces = False
    """Whether it can start a process in the place of one that has ended (Runtime.replace)."""

    @pytest.fixture
    def runtime(self) -> Runtime:
        """The author's runtime, started."""
        return missing_fixture(self, "runtime", "your Runtime, started")

    @pytest.fixture
    def groups(self, runtime) -> Callable[..., WorkerGroup]:
        """A function (name, ranks) -> a group of fresh Probes in the pool of that name and size."""
        return probe_groups(runtime)

    def test_results_come_back_from_every_rank(self, groups):
        """A call to both ranks of a pool returns one result per rank."""
        results = groups("probe", ranks=2).note(4).result()
        require(
            results == [40, 41],
            got=f"{results} from two ranks",
            expected="[40, 41]: one result per rank, in their order",
            likely="launch gives processes in another order, or one process for both ranks",
        )

    def test_calls_run_in_the_order_in_which_they_were_sent(self, groups):
        """Twelve calls run one after the other, though the first one takes longer."""
        # A thread per call would let the others pass the first one, which sleeps.
        group = groups()
        for number in range(12):
            seconds = 0.02 if number == 0 else 0.0
            group.note(number, seconds)

        numbers = group.noted().result()
        require(
            numbers == list(range(12)),
            got=f"calls ran in order {numbers}",
            expected="the order sent: an update comes before the generation after it",
            likely="a process runs messages in several threads",
        )

    def test_of_several_replies_one_that_is_there_is_told(self, groups, runtime):
        """One rank sleeps, and the other's reply is told first, where the runtime can tell."""
        if type(runtime).first is Runtime.first:
            pytest.skip("it does not tell which reply is there")

        group = groups("probe", ranks=2)
        calls = [
            group.call_on([rank], "note", 1, seconds) for rank, seconds in ((0, 1.5), (1, 0.0))
        ]
        slow, quick = (call.replies[0].reference for call in calls)
        told = runtime.first([slow, quick])
        require(
            told == quick and [call.result() for call in calls] == [10, 11],
            got="of two replies the one was told whose rank sleeps",
            expected="the other one: it is there",
            likely="first returns the first of the replies",
        )

    def test_rows_are_split_and_come_back_in_order(self, groups):
        """A batch is split over two ranks, which double its rows."""
        # Even, uneven, and with nothing for the second rank.
        group = groups("probe", ranks=2)
        for rows in (8, 7, 1):
            doubled = group.double(Batch({"x": torch.arange(float(rows))}))
            values = torch.as_tensor(doubled["x"].values).tolist()
            expected = [2.0 * i for i in range(rows)]
            mean = (rows - 1) / 2  # of 0 ... rows - 1
            require(
                values == expected and doubled.metrics["sum"] == mean,
                got=f"{values}, metrics {doubled.metrics!r}",
                expected=f"each of {rows} rows doubled, in order; metrics of both ranks merged",
                likely="replies are mixed up between ranks",
            )

    def test_a_result_goes_to_another_pool_by_reference(self, groups, runtime):
        """A large column goes from pool to pool without passing the controller."""
        first = groups("first")
        second = groups("second")
        rows = LARGE // 10
        runtime.traffic.take()
        total = second.total(first.make(rows)).result()
        traffic = runtime.traffic.take()

        # The column has the numbers 0 ... count - 1.
        count = rows * 10
        expected = [count * (count - 1) / 2]
        require(
            total == expected,
            got=f"the sum of a column made in one pool and read in another is {total}",
            expected=f"{expected}",
            likely="a reply that is an argument of another call is not delivered before that call "
            "starts",
        )

        require(
            0 < sum(traffic.values()) < 40_000,
            got=f"{traffic} bytes through the controller for a column of {4 * count} bytes",
            expected="messages of some kB, counted in runtime.traffic",
            likely="the store keeps columns inside the reply, so that they travel through the "
            "controller",
        )

    def test_what_the_controller_reads_is_counted(self, groups, runtime):
        """Reading a large column brings it to the controller, under `fetched` in the traffic."""
        rows = LARGE // 10
        made = groups().make(rows)
        runtime.traffic.take()
        column = torch.as_tensor(made["x"].values)
        traffic = runtime.traffic.take()

        # The column counts up to LARGE - 1; an entry has 4 bytes.
        full = column.shape == (rows, 10)
        right = full and float(column[-1, -1]) == LARGE - 1
        require(
            right and traffic["fetched"] >= 4 * LARGE,
            got=f"a column of shape {tuple(column.shape)}, traffic {traffic}",
            expected=f"the column, and at least {4 * LARGE} bytes under `fetched`",
            likely="get gives another block, or columns travel inside replies",
        )

    def test_writing_in_place_changes_nobody_elses_rows(self, groups):
        """A large and a small column stay as they were returned, whoever writes to them after."""
        first = groups("first")
        second = groups("second")
        # A small column may travel inside the reply, a large one in the store.
        for rows in (LARGE // 10, 20):
            made = first.make(rows)
            expected = float(np.arange(rows * 10, dtype=np.float64).sum())

            # A reader writes to what arrived, and then the maker to what it returned.
            second.write_into(made).metrics  # noqa: B018  (waits)
            first.scribble().result()
            total = second.total(made).result()
            require(
                total == [expected],
                got=f"a column of {rows} rows sums to {total} after its maker and a reader wrote "
                "to their tensors",
                expected=f"[{expected}]: a result is what was returned",
                likely="blocks share memory with a worker's tensors: copy in put, and give "
                "read-only or copied arrays in get",
            )

    def test_a_failure_says_where_it_was(self, groups):
        """WorkerError has role, method, rank and traceback; the process lives on."""
        # Rank 0 returns, rank 1 raises.
        group = groups("probe", ranks=2)
        error = require_raises(
            lambda: group.fail(1).result(),
            WorkerError,
            what="a call that raised on rank 1",
            likely="Host.call never raises; the runtime must bring its reply back",
        )
        text = str(error)
        place = (error.role, error.phase, error.rank)
        told = "no such unit" in text and "KeyError" in text
        require(
            place == ("probe", "fail", 1) and told,
            got=f"role {error.role!r}, phase {error.phase!r}, rank {error.rank}, text "
            f"{text!r:.200}",
            expected="role 'probe', phase 'fail', rank 1, and what was raised with its traceback",
            likely="the error is wrapped or replaced on its way",
        )

        # The next call must work as if nothing had been.
        try:
            outcome = group.note(1).result()
        except Exception as failure:
            outcome = failure
        require(
            outcome == [10, 11],
            got=f"{outcome!r:.200} from the next call to the group",
            expected="a process outlives a failed call",
            likely="the process ends with the exception",
        )

    def test_the_first_failure_of_a_chain_is_the_one_that_is_told(self, groups):
        """The error of two calls that needed a failed call's result names the failed call."""
        first = groups("first")
        second = groups("second")
        # The controller waits for none of the three before it reads the last.
        failed = first.fail_on(Batch({"x": torch.arange(3.0)}))
        chained = second.double(second.double(failed))
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
        """A result that cannot be pickled is the call's WorkerError, not a call without an end."""
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
        """A new group of workers can be made in the pool of a closed group."""
        group = groups("first")
        group.close()
        new = WorkerGroup(Probe, group.pool, name="two")
        require(
            new.noted().result() == [],
            got="a new group in the pool of a closed one that does not work",
            expected="processes outlive their workers",
            likely="closing a group ends the pool's processes",
        )

    def test_ranks_of_a_pool_have_collectives(self, groups):
        """Two ranks add up their numbers by an all-reduce."""
        if not self.collectives:
            pytest.skip("its ranks have no torch.distributed group")

        sums = groups("probe", ranks=2).sum_of_ranks().result()
        require(
            sums == [3.0, 3.0],
            got=f"an all-reduce over two ranks of 1 and 2 gave {sums}",
            expected="[3.0, 3.0]",
            likely="launch did not let each Host join the pool's group",
        )

    def test_pools_run_side_by_side(self, groups):
        """Two calls of 1.5 s in two pools overlap in time."""
        if not self.processes:
            pytest.skip("its pools share a process")

        first = groups("first")
        second = groups("second")
        started = time.monotonic()
        for future in (first.note(1, 1.5), second.note(2, 1.5)):
            future.result()
        # One after the other they would take 3 s.
        spent = time.monotonic() - started
        require(
            spent < 2.8,
            got=f"two calls of 1.5 s in two pools took {spent:.1f} s",
            expected="about 1.5 s",
            likely="submit waits for the call, or pools share a process",
        )

    def test_processes_take_the_places_of_an_expendable_group_of_which_one_has_ended(
        self, groups, runtime
    ):
        """Its end is told to who waits for its group alone; fresh ones work in their places."""
        if not self.replaces:
            pytest.skip("it replaces no processes")

        group, other = groups("replaced", ranks=3, cut=((0,), (1, 2))), groups("first")
        sums = [group.sum_of_ranks().result()]
        for process in group.pool.processes[1:]:
            process.expendable = True
        lost = group.call_on([1, 2], "end_while_others_wait")
        rows = group.call_on([2], "double", Batch({"x": torch.arange(3.0)}))
        needs_them = other.double(rows)
        undisturbed = other.note(3, 1.5).result()
        require_raises(
            lost.result,
            WorkerDied,
            what="a call in which a process was killed, and its peer waits for it",
            likely="wait does not look at the other process, and would wait for ever",
        )
        ended = [process.rank for process in runtime.ended(group.pool.processes)]
        group.pool.replace([1, 2])
        group.renew([1, 2]).result()
        sums.append(group.sum_of_ranks().result())
        found = group.note(4).result()
        require_raises(
            lambda: needs_them["x"],
            WorkerDied,
            what="a call that needs what the killed process would have returned",
            likely="the lost reply is delivered as a value",
        )
        later = other.note(5, 1.5).result()
        require(
            (undisturbed, ended, found, later) == ([30], [2], [40, 40, 41], [50]),
            got=f"another pool's call gave {undisturbed}, and {later} later; ended are ranks "
            f"{ended}; with the fresh processes a call of all ranks gives {found}",
            expected="[30], [50], [2] and [40, 40, 41], by ranks of two groups",
            likely="ended or replace is about another process, or wait raises for one that is "
            "expendable, whose end others may find in what they read",
        )
        require(
            sums == [[1.0, 5.0, 5.0]] * 2,
            got=f"sums of the ranks' numbers over their groups before and after are {sums}",
            expected="[1.0, 5.0, 5.0] both times",
            likely="launch or replace joins another torch.distributed group than pool.groups says",
        )

    # These two come last: a runtime may refuse everything once a pool is stuck or a process is
    # gone, since a run ends then.
    def test_a_failure_is_told_while_other_ranks_wait_for_the_failed_one(self, groups):
        """Rank 1's error is raised although rank 0 is stuck in an all-reduce with it."""
        if not self.collectives:
            pytest.skip("its ranks have no torch.distributed group")

        group = groups("waiting", ranks=2)
        groups("doomed")  # of the next test: it starts while all is well
        started = time.monotonic()
        error = require_raises(
            lambda: group.fail_while_others_wait().result(),
            WorkerError,
            what="a call in which rank 1 raised and rank 0 waits for it",
            likely="replies are waited for one after the other: look at all of them while one does "
            "not come",
        )

        seconds = time.monotonic() - started
        require(
            error.rank == 1 and "no such unit" in str(error) and seconds < 120,
            got=f"rank {error.rank}, {str(error)!r:.200}, after {seconds:.0f} s",
            expected="what rank 1 raised, soon",
            likely="the first error is that of a collective which ran into its time limit",
        )

    def test_a_process_that_dies_is_an_error_with_its_place(self, groups):
        """A call whose process is killed raises WorkerDied with the role and the method."""
        if not self.processes:
            pytest.skip("its ranks live in the controller's process")

        # The test before this one has started its pool, where it was not skipped.
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
