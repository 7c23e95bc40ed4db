"""What runs inside each process of a pool, whatever the runtime: workers by role, called by messages."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.core.contracts.runtime import Store
from hybridflow.core.contracts.worker import RankContext, Worker
from hybridflow.core.errors import HybridFlowError, WorkerError
from hybridflow.core.groups.wire import Decoder, Encoder
from hybridflow.core.values.batch import Batch


class Reply:
    """A call's outcome, as it is pickled: the value or the error, and when the worker started and ended."""

    __slots__ = ("ended", "error", "started", "value")

    def __init__(self, value: Any, error: WorkerError | None, started: float, ended: float):
        self.value, self.error, self.started, self.ended = value, error, started, ended


def read_reply(blob: bytes, handles: Sequence[Any], failed: bool, store: Store) -> Reply:
    started, ended, value = Decoder(blob, handles, store).load()
    return Reply(None, value, started, ended) if failed else Reply(value, None, started, ended)


def write_call(role: str, method: str, keep: bool, arguments: bytes) -> bytes:
    """A message's blob. keep: whether the rank's result counts; arguments: (args, kwargs) as an Encoder wrote them."""
    return pickle.dumps((role, method, keep), protocol=5) + arguments


def read_call(blob: bytes) -> tuple[tuple[str, str, bool], bytes]:
    """((role, method, keep), arguments)."""
    stream = io.BytesIO(blob)
    return pickle.load(stream), stream.read()


class Host:
    """One per process. `call` never raises: failures of a worker are replies."""

    def __init__(self, pool: str, rank: int, world: int, store: Store):
        self.pool, self.rank, self.world, self.store = pool, rank, world, store
        self.device = torch.device("cpu")
        self.workers: dict[str, Worker] = {}
        self._joined = False

    def address(self) -> str:
        """A free address on this node for the pool's rendezvous."""
        host = (
            "127.0.0.1"
            if os.environ.get("HYBRIDFLOW_LOCAL")
            else socket.gethostbyname(socket.gethostname())
        )
        with socket.socket() as s:
            s.bind(("", 0))
            return f"{host}:{s.getsockname()[1]}"

    def join(self, address: str | None, device: str, timeout_s: float = 600.0) -> None:
        """Join the pool's torch.distributed group (NCCL with gloo on GPUs, gloo on CPUs)."""
        self.device = torch.device(
            device if device == "cpu" else f"cuda:{_local_device(self.rank)}"
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if dist.is_initialized():
            if self.world == 1 and dist.get_world_size() == 1:
                return  # pools of one rank may share the calling process
            raise HybridFlowError(
                f"torch.distributed is initialised already, with {dist.get_world_size()} ranks"
            )
        kwargs: dict[str, Any] = (
            {"store": dist.HashStore()} if address is None else {"init_method": f"tcp://{address}"}
        )
        dist.init_process_group(
            backend,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=timeout_s),
            **kwargs,
        )
        self._joined = True

    def _close(self, role: str) -> None:
        worker = self.workers.pop(role, None)
        if worker is not None:
            worker.close()

    def leave(self) -> None:
        for role in list(self.workers):
            self._close(role)
        if (
            self._joined and dist.is_initialized()
        ):  # a group that somebody else made is not ours to end
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def call(
        self, blob: bytes, handles: Sequence[Any], replies: Sequence[tuple]
    ) -> tuple[bytes, list[Any], bool]:
        """Run one message; give (blob, handles, failed) of the reply."""
        started = time.time()
        role, name = "?", "?"
        try:

            def resolve(at: int) -> Batch:
                blob, handles, failed = replies[at]
                reply = read_reply(blob, handles, failed, self.store)
                if reply.error is not None:
                    raise reply.error
                return reply.value

            (role, name, keep), arguments = read_call(blob)
            args, kwargs = Decoder(arguments, handles, self.store, resolve).load()
            result = self._method(role, name)(*args, **kwargs)
            return *self._encode((started, time.time(), result if keep else None)), False
        except (
            WorkerError
        ) as error:  # the input of this call failed: the first failure is what matters
            return *self._encode((started, time.time(), error)), True
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.world == 1:
                raise
            return *self._encode((started, time.time(), self._failure(error, role, name))), True

    def _method(self, role: str, name: str) -> Callable:
        if name == "__create__":
            return lambda cls, *args: self.create(role, cls, *args)
        if name == "__delete__":
            return lambda: self._close(role)
        if role not in self.workers:
            raise HybridFlowError(
                f"there is no worker of role {role!r} here; its group was closed, or failed to build"
            )
        return getattr(self.workers[role], name)

    def create(
        self, role: str, cls: type[Worker], args: tuple, kwargs: dict, layout, generation, seed: int
    ) -> None:
        context = RankContext(role, self.rank, layout, self.device, seed, generation, self.store)
        self.workers[role] = cls(context, *args, **kwargs)

    def _encode(self, reply: tuple) -> tuple[bytes, list[Any]]:
        encoder = Encoder(self.store)
        return encoder.dumps(reply), encoder.handles

    def _failure(self, error: BaseException, role: str, phase: str) -> WorkerError:
        text = (
            str(error) if isinstance(error, HybridFlowError) else f"{type(error).__name__}: {error}"
        )
        return WorkerError(
            text, role=role, phase=phase, rank=self.rank, remote_traceback=traceback.format_exc()
        )


def _local_device(rank: int) -> int:
    return rank % max(torch.cuda.device_count(), 1)
