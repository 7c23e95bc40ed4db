"""Everything in the calling process: a breakpoint in a worker just works, and nothing has to start.

One rank runs in the caller's thread. Several ranks get a thread each (calls that wait for one another would deadlock
otherwise); torch.distributed is process-wide, so they have no collectives: models run on one rank, or under `ray`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.core.contracts.runtime import (
    Label,
    Message,
    Process,
    ResourcePool,
    Runtime,
    RuntimeSettings,
)
from hybridflow.core.groups.host import Host


@attrs.frozen
class InlineConfig(RuntimeSettings):
    """The inline runtime."""

    threads: int = attrs.field(default=0)
    """Threads of torch's operators; 0 leaves torch's own choice."""


class InlineStore:
    """Blocks by themselves; copied in, as a real store does, so that the maker may go on writing to its tensors."""

    def put(self, block: list) -> Any:
        return Block([np.array(a, copy=True) for a in block])

    def get(self, handle: Any) -> list:
        return handle.arrays


class Block:
    __slots__ = ("arrays",)

    def __init__(self, arrays: list):
        self.arrays = arrays


class InlineProcess(Process):
    def __init__(self, pool: ResourcePool, rank: int):
        self.pool, self.rank = pool, rank
        self.host = Host(pool.name, rank, pool.world, InlineStore())
        self.thread = ThreadPoolExecutor(1, f"{pool.name}-{rank}") if pool.world > 1 else None

    def submit(self, message: Message, label: Label) -> Future:
        if self.thread is not None:
            return self.thread.submit(self._run, message)
        done: Future = Future()
        done.set_result(self._run(message))
        return done

    def _run(self, message: Message) -> tuple[bytes, Sequence[Any], bool]:
        return self.host.call(message.blob, message.handles, [r.result() for r in message.replies])


class InlineRuntime(Runtime):
    """A plugin of kind "runtime", name "inline"."""

    def __init__(self, config: InlineConfig | None = None):
        super().__init__(config or InlineConfig())
        self.store = InlineStore()
        self.processes: list[InlineProcess] = []

    def start(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)

    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        os.environ.update(environment)
        processes = [InlineProcess(pool, rank) for rank in range(pool.world)]
        if pool.world == 1:
            processes[0].host.join(None, device)
        self.processes += processes
        return list(processes)

    def wait(self, reply: Future) -> tuple[bytes, Sequence[Any], bool]:
        return reply.result()

    def check_alive(self) -> None:
        """The only process is this one."""

    def put(self, block: list) -> Any:
        return self.store.put(block)

    def get(self, handle: Any) -> list:
        return self.store.get(handle)

    def shutdown(self) -> None:
        for process in self.processes:
            if process.thread is not None:
                process.thread.shutdown(cancel_futures=True)
            process.host.leave()
        self.processes = []
