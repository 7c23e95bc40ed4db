"""Probe: the worker that RuntimeConformance calls, and worker groups of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool, Runtime
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics

LARGE = 200_000
"""float32 numbers of a column that must not pass the controller: 800 kB."""


class Probe(Worker):
    """A worker whose methods show how a runtime carries calls, results and failures."""

    def __init__(self, context):
        super().__init__(context)
        self.seen: list[int] = []
        """The numbers that `note` was called with, in order."""
        self.kept: Batch | None = None

    @register(Protocol.ONE_TO_ALL)
    def note(self, number: int, seconds: float = 0.0) -> int:
        """Sleep, keep the number, and return ten times it plus the rank."""
        time.sleep(seconds)
        self.seen.append(number)
        return number * 10 + self.rank

    @register(Protocol.RANK_ZERO)
    def noted(self) -> list[int]:
        """Return the numbers of `note` so far."""
        return self.seen

    @register(Protocol.DP)
    def double(self, batch: Batch) -> Batch:
        """Return column x times 2, with the mean of x as the metric `sum`."""
        values = torch.as_tensor(batch["x"].values)
        metrics = Metrics({"sum": (float(values.sum()), len(values))})
        return Batch({"x": values * 2}, metrics)

    @register(Protocol.DP, same_rows=False)
    def make(self, rows: int) -> Batch:
        """Return a column x [rows, 10] that counts up, and a ragged column ids.

        The worker keeps x's tensor, which `scribble` writes to.
        """
        self.large = torch.arange(rows * 10, dtype=torch.float32).view(rows, 10)
        ids = tokens([torch.arange(i % 3) for i in range(rows)], torch.int64)
        return Batch({"x": self.large, "ids": ids})

    @register(Protocol.ONE_TO_ALL)
    def scribble(self) -> None:
        """Write to the tensor that `make` returned, as a worker may with its own."""
        self.large.fill_(-1.0)

    @register(Protocol.DP)
    def write_into(self, batch: Batch) -> Batch:
        """Write to the column x that arrived, and return it."""
        values = torch.as_tensor(batch["x"].values)

        # Another reader sees this where the runtime lets rows share memory.
        values.fill_(-7.0)
        return Batch({"x": values})

    @register(Protocol.DP)
    def total(self, batch: Batch) -> float:
        """Return the sum of column x, added in float64."""
        values = torch.as_tensor(batch["x"].values)
        return float(values.double().sum())

    @register(Protocol.ONE_TO_ALL)
    def fail(self, on_rank: int) -> int:
        """Raise KeyError on one rank; the others return their rank."""
        if self.rank == on_rank:
            raise KeyError("no such unit")
        return self.rank

    @register(Protocol.DP)
    def fail_on(self, batch: Batch) -> Batch:
        """Raise KeyError on every rank."""
        raise KeyError("no such unit")

    @register(Protocol.ONE_TO_ALL)
    def unsendable(self) -> object:
        """Return a generator, which cannot be pickled."""
        return (i for i in range(3))

    @register(Protocol.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        """Return the sum of pool_rank + 1 over the ranks of a process group, if there is one."""
        # Without a group the rank's own number is the sum.
        value = torch.tensor([float(self.context.pool_rank + 1)])
        if dist.is_initialized():
            dist.all_reduce(value)
        return float(value)

    @register(Protocol.ONE_TO_ALL)
    def fail_while_others_wait(self) -> float:
        """Raise KeyError on rank 1 while the others wait for it in an all-reduce."""
        if self.rank == 1:
            raise KeyError("no such unit")
        return self.sum_of_ranks()

    @register(Protocol.ONE_TO_ALL)
    def end_while_others_wait(self) -> None:
        """Kill rank 1's process, while the others wait much longer, as NCCL may."""
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    @register(Protocol.ONE_TO_ALL)
    def end_the_process(self) -> None:
        """Kill this process with SIGKILL, as happens where memory runs out."""
        os.kill(os.getpid(), signal.SIGKILL)


def probe_groups(runtime: Runtime) -> Callable[..., WorkerGroup]:
    """Return a function (name, ranks, cut) -> a group of fresh Probes; cut: ResourcePool.groups.

    Pools of one name and size are started once per runtime.
    """
    pools: dict[tuple[str, int], Pool] = runtime.__dict__.setdefault("_conformance_pools", {})

    def make(
        name: str = "first", ranks: int = 1, cut: tuple[tuple[int, ...], ...] | None = None
    ) -> WorkerGroup:
        # The pools are kept on the runtime, for the next test with it.
        if (name, ranks) not in pools:
            spec = ResourcePool(f"conformance-{name}-{ranks}", (ranks,), groups=cut)
            pools[name, ranks] = Pool.launch(spec, runtime, "cpu")
        return WorkerGroup(Probe, pools[name, ranks], name=name)

    return make
