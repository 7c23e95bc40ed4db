"""A few long-lived gloo processes that run functions as the ranks of a group; and a fresh one for a call."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = [
    "helpers.training_jobs", "helpers.hybrid_jobs", "helpers.reshard_jobs",
    "hybridflow.backends.fsdp.backend", "torch.distributed.tensor",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama", "torch._dynamo",
]  # fmt: skip
PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends, here the one that ranks are forked from."""
LIMIT_S = 280.0
"""How long a function may take."""


class Ranks:
    """`ranks(function, world, *args)` gives function(rank, world, *args) of each rank.

    One rank is the calling process. Each larger world has processes of its own, for DTensor's caches outlive the groups
    that they name.
    """

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, function: Callable, world: int, *args: Any) -> list[Any]:
        """Raises RuntimeError with the tracebacks of the ranks that failed."""
        if world == 1:
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return [function(0, 1, *args)]
        if world not in self._pools:
            self._pools[world] = Pool(world)
        try:
            return self._pools[world](function, *args)
        except RuntimeError:
            self._pools.pop(world).end()
            raise

    def renew(self, world: int) -> None:
        """Let the next call with this world have processes of its own, in which nothing has been built."""
        if world in self._pools:
            self._pools.pop(world).end()

    def end(self) -> None:
        """End the processes; safe to call twice.

        The group of one rank stays: others of the module may hold it (`no_group_is_left` of conftest.py ends it).
        """
        while self._pools:
            self._pools.popitem()[1].end()


class Pool:
    """Processes that are stopped between calls: each gloo group has a thread that wakes up a hundred times a second."""

    def __init__(self, world: int):
        self._store = tempfile.TemporaryDirectory()
        forks = mp.get_context("forkserver")
        forks.set_forkserver_preload(
            PRELOADED
        )  # imported once, by the process that all ranks are forked from
        pipes = [forks.Pipe() for _ in range(world)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            forks.Process(
                target=_serve,
                args=(rank, world, pipe, f"file://{self._store.name}/store"),
                daemon=True,
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        atexit.register(self.end)  # before multiprocessing waits for processes that are stopped

    def __call__(self, function: Callable, *args: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        try:
            return self._answers(function, args)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _answers(self, function: Callable, args: tuple) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))  # by value, not through shared memory
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(answers) < len(self._pipes) and time.monotonic() < deadline:
            for pipe in wait([p for rank, p in enumerate(self._pipes) if rank not in answers], 1.0):
                rank = self._pipes.index(pipe)
                answers[rank] = pickle.loads(pipe.recv_bytes())
                if not answers[rank][0]:  # the others may wait for it for ever
                    deadline = min(deadline, time.monotonic() + 3.0)
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in answers.items() if not good]
        failed += [
            f"rank {rank}: no answer" for rank in range(len(self._pipes)) if rank not in answers
        ]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def end(self) -> None:
        atexit.unregister(self.end)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._store.cleanup()


def _serve(rank: int, world: int, pipe: Any, store: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # A stopped process does not see that its pipe is closed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, function(rank, world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of a module of tests/helpers or of ours."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result(timeout=200)
