"""What vLLM does to the process that it lives in, undone; the only place that knows of its internals' side effects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SHARED = Path("/dev/shm")


@contextlib.contextmanager
def a_guest(variables: dict[str, str]) -> Iterator[None]:
    """For vLLM's start: environment variables for its time, and torch's global settings as they were behind it.

    Its CPU worker replaces torch.set_num_threads by a function that does nothing.
    """
    before = {name: os.environ.get(name) for name in variables}
    grad, dtype, set_threads = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.set_num_threads,
    )
    threads = torch.get_num_threads()
    os.environ.update(variables)
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def own_shared_memory(token: str) -> Iterator[None]:
    """Names under /dev/shm that no other job has, and none left behind: all ranks have mapped the memory when it ends.

    On a CPU vLLM's ranks reduce through shared memory, whose name is the same for every job that an external launcher
    started: one collides with what a killed job has left. token: equal on the ranks of a job, and on no others.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    names = cpu_communicator._CPUSHMDistributed
    before = names.make_group_name
    names.make_group_name = staticmethod(
        lambda communicator: (
            f"hybridflow-{token}-{communicator.unique_name.replace(':', '-')}-"
            f"{'-'.join(map(str, communicator.ranks))}-cpushm"
        )
    )
    try:
        yield
        dist.barrier()
    finally:
        names.make_group_name = staticmethod(before)
        for left in SHARED.glob(f"*{token}*"):
            left.unlink(missing_ok=True)
        _unlink_queues()


def end(engine: Any) -> None:
    """vLLM's own end, run at the interpreter's, would destroy process groups that are not its own."""
    client = engine.engine_core
    if (finalizer := getattr(client, "_finalizer", None)) is not None:
        finalizer.detach()
    if (
        inner := getattr(client, "engine_core", None)
    ) is not None and inner.model_executor is not None:
        inner.model_executor.shutdown()


def _unlink_queues() -> None:
    """Of the groups that vLLM has made: memory through which a rank tells the others, kept while it is mapped."""
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        group = reference()
        buffer: Any = getattr(group.mq_broadcaster, "buffer", None) if group is not None else None
        if buffer is not None and buffer.is_creator:
            with contextlib.suppress(FileNotFoundError):
                buffer.shared_memory.unlink()
