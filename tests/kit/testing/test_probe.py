"""The worker that suites of runtimes call does what they take for granted."""

from __future__ import annotations

import pytest
import torch

from hybridflow.backends.inline.runtime import InlineRuntime
from hybridflow.core.errors import WorkerError
from hybridflow.core.values.batch import Batch
from hybridflow.kit.testing.probe import Probe, probe_groups


@pytest.fixture
def runtime():
    inline = InlineRuntime()
    inline.start()
    yield inline
    inline.shutdown()


@pytest.fixture
def groups(runtime):
    return lambda *name, ranks=1: probe_groups(runtime)(*name, ranks=ranks)


def rows(*numbers):
    return Batch({"x": torch.tensor(numbers)})


def test_a_pool_is_started_once_and_each_group_is_fresh(groups):
    first = groups("first")
    first.note(3).result()
    again = groups("first")
    assert again.pool is first.pool
    assert again.noted().result() == []
    assert groups("second").pool is not first.pool
    assert groups("first", ranks=2).pool.spec.world == 2


def test_what_is_noted_is_kept_in_order_and_told_by_rank(groups):
    group = groups(ranks=2)
    assert group.note(4).result() == [40, 41]
    assert group.note(2, 0.01).result() == [20, 21]
    assert group.noted().result() == [4, 2]


def test_rows_are_doubled_with_their_sum_as_a_figure(groups):
    doubled = groups(ranks=2).double(rows(1.0, 2.0, 6.0))
    assert doubled["x"].values.tolist() == [2.0, 4.0, 12.0]
    assert doubled.metrics["sum"] == 3.0


def test_a_made_column_is_counted_up_and_its_maker_may_write_to_its_own(groups):
    group = groups()
    made = group.make(4)
    assert made["x"].values.tolist() == torch.arange(40.0).view(4, 10).tolist()
    assert [row.tolist() for row in made["ids"]] == [[], [0], [0, 1], []]
    group.scribble().result()
    assert group.total(made).result() == [780.0]


def test_a_reader_may_write_to_what_arrived(groups):
    given = rows(1.0, 2.0)
    assert groups().write_into(given)["x"].values.tolist() == [-7.0, -7.0]
    assert given["x"].values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("call", ["fail", "fail_while_others_wait"])
def test_rank_1_alone_fails(call, groups):
    group = groups(ranks=2)
    arguments = [1] if call == "fail" else []
    with pytest.raises(WorkerError, match="no such unit") as failure:
        getattr(group, call)(*arguments).result()
    assert (failure.value.phase, failure.value.rank) == (call, 1)


def test_no_rank_fails_where_none_is_asked_to(groups):
    assert groups(ranks=2).fail(2).result() == [0, 1]
    with pytest.raises(WorkerError, match="no such unit"):
        groups().fail_on(rows(1.0)).metrics  # noqa: B018  (waits)


def test_a_generator_cannot_be_sent(groups):
    with pytest.raises(WorkerError, match="generator"):
        groups().unsendable().result()


def test_without_collectives_a_rank_sums_its_own_number(groups):
    assert groups(ranks=2).sum_of_ranks().result() == [1.0, 2.0]


def test_it_is_a_worker_of_its_group(groups):
    group = groups("probe")
    [process] = group.pool.processes
    assert isinstance(process.host.workers["probe"], Probe)
