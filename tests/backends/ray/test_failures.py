"""Processes that die and ranks that fail while their peers wait for them."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from hybridflow.backends.ray.runtime import RayRuntime
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import WorkerDied, WorkerError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.values.batch import Batch


class Mortal(Worker):
    @register(Protocol.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Protocol.THREE_D)
    def train(self, batch: Batch, dies: int | None = None, fails: int | None = None) -> Batch:
        """A collective, which ranks that die or fail never reach."""
        if self.rank == dies:
            os._exit(1)
        if self.rank == fails:
            raise FloatingPointError("the loss is nan")
        self.context.sum([1.0])
        return batch

    @register(Protocol.THREE_D)
    def sleep(self, batch: Batch) -> Batch:
        time.sleep(600)
        return batch


BATCH = Batch({"x": torch.zeros(8, 1000)})


@pytest.fixture
def runtime(ray_cluster):
    """One for each test: a runtime that lost a process says so from then on."""
    runtime = RayRuntime()
    runtime.start()
    yield runtime
    runtime.shutdown()


@pytest.fixture
def group(runtime):
    return WorkerGroup(Mortal, Pool.launch(ResourcePool("main", (2,)), runtime), name="actor")


def within(seconds, call):
    started = time.perf_counter()
    with pytest.raises(WorkerError) as error:
        call()
    assert time.perf_counter() - started < seconds
    return error.value


def check(error, phase="train"):
    assert isinstance(error, WorkerDied)
    assert (error.role, error.phase, error.rank) == ("actor", phase, 1)
    assert "the process of rank 1 of pool 'main' is gone" in str(error)


def test_a_process_that_ends_in_a_collective_is_worker_died_while_its_peer_waits(group):
    check(within(20, lambda: group.train(BATCH, dies=1)["x"]))
    check(within(20, lambda: group.train(BATCH)["x"]))  # and so is every later call


def test_a_killed_process_is_worker_died_for_whoever_waits_for_its_results(group, runtime):
    consumer = WorkerGroup(Mortal, Pool.launch(ResourcePool("other", (1,)), runtime), name="consumer")
    pid = group.pid().result()[1]
    stored = group.train(BATCH)
    stored["x"]
    slow = consumer.train(group.sleep(BATCH))
    os.kill(pid, signal.SIGKILL)
    check(within(20, lambda: slow["x"]), "sleep")
    error = within(30, lambda: consumer.train(stored)["x"])  # what it had left in the store is lost
    assert isinstance(error, WorkerDied) and error.rank == 1


def test_a_rank_that_fails_while_its_peer_waits_for_it_is_reported_at_once(group):
    out = group.train(BATCH, fails=1)
    later = group.train(out)  # behind it in the queue of the rank that hangs
    for call in (lambda: later["x"], lambda: out["x"]):
        error = within(20, call)
        assert not isinstance(error, WorkerDied)
        assert (error.role, error.phase, error.rank) == ("actor", "train", 1)
        assert "FloatingPointError: the loss is nan" in str(error)
