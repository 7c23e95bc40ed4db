"""The inline runtime: everything runs in the calling process.

Breakpoints in workers work, and no process must be started. One rank runs in the caller's thread.
Several ranks get a thread each, since calls that wait for one another would deadlock otherwise;
torch.distributed has one state per process, so they have no collectives. Models therefore run on
one rank here, or under the runtime `ray`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
    """Settings of the inline runtime."""

    threads: int = attrs.field(default=0)
    """Number of threads of torch's operators. 0 leaves torch's own choice."""
    spin: bool = False
    """Whether these threads spin for milliseconds while they wait for each other. By default they
    spin briefly and then sleep, which is several times faster beside other work. It must be set
    before torch is imported, as the `hybridflow` command does."""


class InlineStore:
    """A store whose handles are the blocks themselves.

    Arrays are copied in, as a real store does, so that their maker may go on writing to them.
    """

    def put(self, block: list) -> Any:
        """Copy a block of arrays; return the copy's handle."""
        return ArrayHandle([np.array(array, copy=True) for array in block])

    def get(self, handle: Any) -> list:
        """Return the block behind a handle, without a copy."""
        return handle.arrays


class ArrayHandle:
    """A handle, hashable by identity as lists are not."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: list):
        self.arrays = arrays


class InlineProcess(Process):
    """A rank in the calling process: in the caller's thread if it is alone, else in its own."""

    def __init__(self, pool: ResourcePool, rank: int):
        self.pool = pool
        self.rank = rank
        self.host = Host(pool.name, rank, pool.members(rank), InlineStore())

        # One thread runs the rank's calls in the order sent.
        self.thread: ThreadPoolExecutor | None = None
        if pool.world > 1:
            self.thread = ThreadPoolExecutor(1, f"{pool.name}-{rank}")

    def submit(self, message: Message, label: Label) -> Future:
        """Run a call at once, or queue it for the rank's thread; return the future of its reply."""
        if self.thread is not None:
            return self.thread.submit(self._run, message)

        # Without a thread the future has its result from the start.
        reply: Future = Future()
        reply.set_result(self._run(message))
        return reply

    def _run(self, message: Message) -> tuple[bytes, Sequence[Any], bool]:
        # Futures of other ranks are waited for here, in this rank's thread.
        inputs = [reply.result() for reply in message.replies]
        return self.host.call(message.blob, message.handles, inputs)


class InlineRuntime(Runtime):
    """A plugin of kind "runtime", name "inline"."""

    def __init__(self, config: InlineConfig | None = None):
        super().__init__(config or InlineConfig())

        # Handles are valid in every InlineStore: they hold the arrays themselves.
        self.store = InlineStore()
        self.processes: list[InlineProcess] = []

    def start(self) -> None:
        """Set torch's number of threads, if one is configured."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)

    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        """Make a host per rank; the environment is set in the calling process and stays there."""
        os.environ.update(environment)  # before any worker is made, which may read it
        processes = [InlineProcess(pool, rank) for rank in range(pool.world)]

        # Only a single rank can join a process group: there is one per process.
        if pool.world == 1:
            processes[0].host.join(None, device)

        self.processes += processes
        return list(processes)  # for the type: a list[InlineProcess] is no list[Process]

    def wait(self, reply: Future) -> tuple[bytes, Sequence[Any], bool]:
        """Wait for a call of a rank's thread; a single rank has run it already."""
        return reply.result()

    def first(self, replies: Sequence[Future]) -> Future:
        """Wait until one of these replies is there, and return it."""
        arrived = wait(replies, return_when=FIRST_COMPLETED).done
        return next(reply for reply in replies if reply in arrived)

    def check_alive(self) -> None:
        """Do nothing: the only process is this one."""

    def put(self, block: list) -> Any:
        """Leave a copy of a block; return its handle."""
        return self.store.put(block)

    def get(self, handle: Any) -> list:
        """Return the block behind a handle."""
        return self.store.get(handle)

    def shutdown(self) -> None:
        """Drop the calls that wait, end the threads, and close the workers of every rank."""
        for process in self.processes:
            if process.thread is not None:
                process.thread.shutdown(cancel_futures=True)
            process.host.leave()

        self.processes = []
