"""What the Ray runtime starts, shares and ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from hybridflow.backends.ray.config import RayConfig
from hybridflow.backends.ray.runtime import RayRuntime
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.group import Pool, WorkerGroup


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
        pool = Pool.launch(ResourcePool("same name", (1,)), runtime, environment={"COLOUR": "green"})
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


def test_a_pool_that_is_larger_than_the_cluster_is_refused_at_once(ray_runtime):
    started = time.perf_counter()
    with pytest.raises(
        HybridFlowError, match=r"'huge' needs \[20000\] cpu devices per node, and the cluster of 1 node"
    ):
        Pool.launch(ResourcePool("huge", (20_000,)), ray_runtime)
    assert time.perf_counter() - started < 5
