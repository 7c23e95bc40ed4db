"""Errors say what happened, and arrive whole from another process."""

from __future__ import annotations

import pickle

import pytest

from hybridflow.core.errors import ConfigError, HybridFlowError, WorkerDied, WorkerError


def test_one_problem_of_a_configuration_is_told_as_one():
    error = ConfigError("a.b: must be above 0")
    assert error.problems == ["a.b: must be above 0"]
    assert str(error) == "the configuration has a problem:\n  - a.b: must be above 0"


def test_several_problems_are_counted_and_listed():
    given = ["x: one", "y: two"]
    error = ConfigError(given)
    given.append("later")
    assert error.problems == ["x: one", "y: two"]
    assert str(error) == "the configuration has 2 problems:\n  - x: one\n  - y: two"


def test_a_failed_worker_is_named_with_its_own_traceback_behind():
    error = WorkerError("boom", role="actor", phase="update", rank=3, remote_traceback="File x.py")
    assert str(error) == (
        "boom [role 'actor', phase 'update', rank 3]\n--- traceback of the worker ---\nFile x.py"
    )
    started = WorkerError("gone", role="ref", phase="start", rank=None)
    assert str(started) == "gone [role 'ref', phase 'start']"


@pytest.mark.parametrize("kind", [WorkerError, WorkerDied])
def test_a_workers_error_is_the_same_after_a_pickle(kind):
    sent = kind("boom", role="actor", phase="update", rank=0, remote_traceback="File x.py")
    got = pickle.loads(pickle.dumps(sent))
    assert type(got) is kind
    assert (got.message, got.role, got.phase, got.rank) == ("boom", "actor", "update", 0)
    assert got.remote_traceback == "File x.py"
    assert str(got) == str(sent)
    assert isinstance(got, HybridFlowError)


def test_the_problems_of_a_configuration_survive_a_pickle():
    got = pickle.loads(pickle.dumps(ConfigError(["x: one", "y: two"])))
    assert got.problems == ["x: one", "y: two"]
    assert str(got) == str(ConfigError(["x: one", "y: two"]))
