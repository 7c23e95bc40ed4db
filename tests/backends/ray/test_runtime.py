"""What the Ray runtime starts, shares and ends, and what it says of processes that die or fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from helpers.paths import matrix
from helpers.waiting import eventually

from hybridflow.backends.ray.config import RayConfig
from hybridflow.backends.ray.runtime import RayRuntime, _later_interruption, _own_signals
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import HybridFlowError, WorkerDied, WorkerError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.processes import page
from hybridflow.core.values.batch import Batch
from hybridflow.kit.hosting.process import EngineProcess


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whether other tests have one or not
    runtime = RayRuntime(RayConfig(address="no address"))
    said = r"Ray cluster at 'no address': .*; check runtime\.address"
    with pytest.raises(HybridFlowError, match=said):
        runtime.start()


class Settings(Worker):
    @register(Protocol.ONE_TO_ALL)
    def look(self) -> tuple:
        return os.getpid(), torch.get_num_threads(), os.environ.get("COLOUR"), os.getcwd()


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_a_runtime_sets_its_workers_up_ends_them_alone_and_leaves_ray_to_its_owner(ray_cluster):
    import ray

    first, second = RayRuntime(RayConfig(threads=2)), RayRuntime()
    pids = []
    for runtime in (first, second):
        runtime.start()
        pool = Pool.launch(
            ResourcePool("same name", (1,)), runtime, environment={"COLOUR": "green"}
        )
        group = WorkerGroup(Settings, pool)
        ((pid, threads, colour, _),) = group.look().result()
        assert (threads, colour) == (runtime.config.threads, "green")
        pids.append(pid)
    assert os.environ.get("COLOUR") is None and pids[0] != os.getpid()
    first.shutdown()
    first.shutdown()
    deadline = time.monotonic() + 20
    while alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids[0]) and alive(pids[1]) and ray.is_initialized()
    assert group.look().result()[0][0] == pids[1]
    second.shutdown()


class Starting(Worker):
    """One with the process of an engine, of which nobody says what it is to start."""

    @register(Protocol.ONE_TO_ALL)
    def start_engine(self, log: str) -> str:
        self.process = EngineProcess(Path(log), {})
        return self.process.scratch

    def close(self) -> None:
        self.process.end()


@pytest.mark.parametrize("local", [True, False])
@matrix
def test_f26_the_files_of_an_engine_end_with_its_run(ray_cluster, tmp_path, monkeypatch, local):
    runtime = RayRuntime()
    runtime.start()
    pool = Pool.launch(ResourcePool("main", (1,)), runtime)
    (scratch,) = WorkerGroup(Starting, pool).start_engine(str(tmp_path / "log")).result()
    Path(scratch, "cache").write_bytes(bytes(1000))
    # A cluster has no folder of a run that could be removed as a whole.
    folder = runtime._folder
    if not local:
        monkeypatch.setattr(runtime, "_local", False)
        monkeypatch.setattr(runtime, "_folder", "")
    runtime.shutdown()
    assert not Path(scratch).exists()
    assert Path(folder).exists() is not local
    shutil.rmtree(folder, ignore_errors=True)


def test_a_pool_that_is_larger_than_the_cluster_is_refused_at_once(ray_runtime):
    started = time.perf_counter()
    with pytest.raises(
        HybridFlowError,
        match=r"'huge' needs \[20000\] cpu devices",
    ):
        Pool.launch(ResourcePool("huge", (20_000,)), ray_runtime)
    assert time.perf_counter() - started < 5


def test_pools_start_together_and_the_one_that_is_late_is_named(ray_cluster):
    runtime = RayRuntime(RayConfig())
    runtime.start()
    pools = [Pool.launch(ResourcePool(name), runtime, wait=False) for name in ("first", "second")]
    # A process imports torch, which takes longer than this: so nothing above has waited for one.
    runtime.config = RayConfig(start_timeout_s=0.001)
    with pytest.raises(
        HybridFlowError, match=r"1 processes of pool 'first' did not start within 0.001 s"
    ):
        runtime.started()
    pids = {
        WorkerGroup(Settings, pool, name=pool.spec.name).look().result()[0][0] for pool in pools
    }
    assert len(pids) == 2
    runtime.shutdown()


def ended_process() -> subprocess.Popen:
    """One that a signal has ended, as a service of Ray's may be."""
    process = subprocess.Popen(["sleep", "60"])
    process.kill()
    process.wait()
    return process


def test_a_service_that_ends_while_pools_start_is_a_loss_to_go_on_from(ray_cluster, monkeypatch):
    runtime = RayRuntime(RayConfig())
    runtime.start()

    def fails(*_: object) -> None:
        raise Exception("Placement group PlacementGroupID(1f) does not exist.")  # as Ray does

    for step in ("_place", "_wait_for_starting"):
        monkeypatch.setattr(runtime, step, fails)
    calls = (lambda: Pool.launch(ResourcePool("main"), runtime, wait=False), runtime.started)
    for call in calls:
        with pytest.raises(Exception, match="does not exist"):
            call()
    runtime._services = {"raylet": ended_process()}
    for call in calls:
        with pytest.raises(
            WorkerDied, match=r"the raylet of the local Ray .* has ended by signal 9"
        ):
            call()
    runtime._services = {}
    runtime.shutdown()


def test_a_process_that_is_killed_while_it_starts_has_died(ray_cluster):
    runtime = RayRuntime(RayConfig())
    runtime.start()
    Pool.launch(ResourcePool("main"), runtime, wait=False)
    [process] = runtime.processes
    ray.kill(process.actor)
    with pytest.raises(WorkerDied, match="the process of rank 0 of pool 'main' is gone"):
        runtime.started()
    runtime.shutdown()


# Processes that die and ranks that fail while their peers wait for them
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


# What TestRay sees, of conformance/test_ours, with the call and the pool by name.
@matrix
def test_a_process_that_ends_in_a_collective_is_worker_died_while_its_peer_waits(group):
    check(within(20, lambda: group.train(BATCH, dies=1)["x"]))
    check(within(20, lambda: group.train(BATCH)["x"]))  # and so is every later call


def test_a_killed_process_is_worker_died_for_whoever_waits_for_its_results(group, runtime):
    consumer = WorkerGroup(
        Mortal, Pool.launch(ResourcePool("other", (1,)), runtime), name="consumer"
    )
    pid = group.pid().result()[1]
    stored = group.train(BATCH)
    stored["x"]
    slow = consumer.train(group.sleep(BATCH))
    os.kill(pid, signal.SIGKILL)
    check(within(20, lambda: slow["x"]), "sleep")
    error = within(30, lambda: consumer.train(stored)["x"])  # what it had left in the store is lost
    assert isinstance(error, WorkerDied) and error.rank == 1


@matrix
def test_a_rank_that_fails_while_its_peer_waits_for_it_is_reported_at_once(group):
    out = group.train(BATCH, fails=1)
    later = group.train(out)  # behind it in the queue of the rank that hangs
    for call in (lambda: later["x"], lambda: out["x"]):
        error = within(20, call)
        assert not isinstance(error, WorkerDied)
        assert (error.role, error.phase, error.rank) == ("actor", "train", 1)
        assert "FloatingPointError: the loss is nan" in str(error)


# Signals while Ray starts and ends
def test_a_ctrl_c_while_ray_is_shut_down_comes_after_it():
    before = signal.getsignal(signal.SIGINT)
    done = False
    with pytest.raises(KeyboardInterrupt), _later_interruption():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done and signal.getsignal(signal.SIGINT) is before
    with _later_interruption():
        pass


def test_a_sigterm_that_ray_takes_reaches_this_program_too(received):
    with pytest.raises(SystemExit), _own_signals():
        assert os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] == "1"
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # as Ray does
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert len(received) == 2 and "RAY_DISABLE_FAILURE_SIGNAL_HANDLER" not in os.environ


# --- what the processes do ---


class Sleeps(Worker):
    @register(Protocol.ONE_TO_ALL)
    def sleep(self, file: str) -> int:
        while not Path(file).exists():
            time.sleep(0.02)
        return self.context.rank


@pytest.mark.parametrize("local", [True, False])
def test_what_each_process_works_on_and_does_is_seen_and_it_can_be_ended(
    ray_cluster, tmp_path, monkeypatch, local
):
    """On a cluster by a task on each node, which here is one."""
    runtime = RayRuntime()
    runtime.start()
    folder = tmp_path / "pages"
    variables = {page.FOLDER: str(folder)}
    pool = Pool.launch(ResourcePool("main", (2,)), runtime, environment=variables)
    monkeypatch.setattr(runtime, "_local", local)
    try:
        WorkerGroup(Sleeps, pool, name="sleeper").sleep(str(tmp_path / "over"))
        eventually(lambda: [label.phase for _, label in runtime.at_work()] == ["sleep", "sleep"])
        eventually(lambda: len([look for look in runtime.look(folder) if look.notes]) == 2)
        ranks = {process.place: process.rank for process in pool.processes}
        found = runtime.look(folder, stacks=True)
        assert sorted(ranks[look.place] for look in found) == [0, 1]
        for look in found:
            assert look.name == f"rank {ranks[look.place]} of pool 'main'"
            assert [note.text for note in look.notes] == ["sleeper/sleep"]
            assert "sleep" in [frame.function for frame in look.thread.frames]

        runtime.kill(next(look for look in found if ranks[look.place] == 1))
        eventually(lambda: not alive(pool.processes[1].place[1]))
        assert alive(pool.processes[0].place[1])
    finally:
        (tmp_path / "over").touch()
        monkeypatch.setattr(runtime, "_local", True)
        runtime.shutdown()
    assert runtime.at_work() == [] and runtime.lost() is None


def test_a_call_that_waits_for_another_one_is_not_at_work(ray_cluster, tmp_path):
    runtime = RayRuntime()
    runtime.start()
    try:
        pools = [Pool.launch(ResourcePool(name, (1,)), runtime) for name in ("first", "second")]
        first, second = (WorkerGroup(Makes, pool) for pool in pools)
        counted = second.count(first.make_when(str(tmp_path / "over")))
        eventually(lambda: [label.phase for _, label in runtime.at_work()] == ["make_when"])
        (tmp_path / "over").touch()
        assert counted.result() == [3]
        assert runtime.at_work() == []
    finally:
        runtime.shutdown()


class Makes(Worker):
    @register(Protocol.RANK_ZERO, same_rows=False)
    def make_when(self, file: str) -> Batch:
        while not Path(file).exists():
            time.sleep(0.02)
        return Batch({"x": torch.zeros(3)})

    @register(Protocol.ONE_TO_ALL, reads=("x",))
    def count(self, batch: Batch) -> int:
        return batch.rows
