"""The worker that the tests of runtimes call, and groups of it."""

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
"""Numbers of a column that must not pass the controller: 800 kB."""


class Probe(Worker):
    """What the tests call."""

    def __init__(self, context):
        super().__init__(context)
        self.seen: list[int] = []
        self.kept: Batch | None = None

    @register(Protocol.ONE_TO_ALL)
    def note(self, number: int, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        self.seen.append(number)
        return number * 10 + self.rank

    @register(Protocol.RANK_ZERO)
    def noted(self) -> list[int]:
        return self.seen

    @register(Protocol.DP)
    def double(self, batch: Batch) -> Batch:
        values = torch.as_tensor(batch["x"].values)
        return Batch({"x": values * 2}, Metrics({"sum": (float(values.sum()), len(values))}))

    @register(Protocol.DP, same_rows=False)
    def make(self, rows: int) -> Batch:
        """A large column, kept and then written to, as a worker may do with its own tensors."""
        self.large = torch.arange(rows * 10, dtype=torch.float32).view(rows, 10)
        made = Batch(
            {
                "x": self.large,
                "ids": tokens([torch.arange(i % 3) for i in range(rows)], torch.int64),
            }
        )
        return made

    @register(Protocol.ONE_TO_ALL)
    def scribble(self) -> None:
        """Write to what `make` returned."""
        self.large.fill_(-1.0)

    @register(Protocol.DP)
    def write_into(self, batch: Batch) -> Batch:
        """Write to what arrived."""
        values = torch.as_tensor(batch["x"].values)
        values.fill_(-7.0)
        return Batch({"x": values})

    @register(Protocol.DP)
    def total(self, batch: Batch) -> float:
        return float(torch.as_tensor(batch["x"].values).double().sum())

    @register(Protocol.ONE_TO_ALL)
    def fail(self, on_rank: int) -> int:
        if self.rank == on_rank:
            raise KeyError("no such unit")
        return self.rank

    @register(Protocol.DP)
    def fail_on(self, batch: Batch) -> Batch:
        raise KeyError("no such unit")

    @register(Protocol.ONE_TO_ALL)
    def unsendable(self) -> object:
        return (i for i in range(3))

    @register(Protocol.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        value = torch.tensor([float(self.rank + 1)])
        if dist.is_initialized():
            dist.all_reduce(value)
        return float(value)

    @register(Protocol.ONE_TO_ALL)
    def fail_while_others_wait(self) -> float:
        if self.rank == 1:
            raise KeyError("no such unit")
        return self.sum_of_ranks()

    @register(Protocol.ONE_TO_ALL)
    def end_the_process(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def probe_groups(runtime: Runtime) -> Callable[..., WorkerGroup]:
    """A function (name, ranks) -> a group of fresh Probes. Pools of one name and size are started once per runtime."""
    pools: dict[tuple[str, int], Pool] = runtime.__dict__.setdefault("_conformance_pools", {})

    def make(name: str = "first", ranks: int = 1) -> WorkerGroup:
        if (name, ranks) not in pools:
            spec = ResourcePool(f"conformance-{name}-{ranks}", (ranks,))
            pools[name, ranks] = Pool.launch(spec, runtime, "cpu")
        return WorkerGroup(Probe, pools[name, ranks], name=name)

    return make
