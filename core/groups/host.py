"""The program of each process of a pool, under any runtime: holds workers by role, and calls them.

A message's blob is pickle((role, method, keep)) followed by the encoding of (args, kwargs); a
reply's blob is the encoding of (started, ended, parts, value or error). See group.py for the path
of a call, and wire.py for the encoding.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.runtime import Store
from hybridflow.core.contracts.worker import COLLECTIVE_TIMEOUT, Part, RankContext, Worker
from hybridflow.core.errors import DamagedError, DamagedPartError, HybridFlowError, WorkerError
from hybridflow.core.groups.rendezvous import FileRendezvous, ServerRendezvous, StoreServer
from hybridflow.core.groups.wire import Decoder, Encoder
from hybridflow.core.processes.page import FOLDER, begin, doing
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.parallel import (
    GenerationLayout,
    ParallelLayout,
    generation_layout,
)


@attrs.frozen(eq=False)
class Reply:
    """A call's outcome: its value or its error, and when the worker started and ended.

    Times are seconds since the epoch, by the clock of the rank's node.
    """

    value: Any
    error: WorkerError | None
    started: float
    ended: float
    parts: tuple[Part, ...] = ()
    """What the call consisted of, as far as the worker tells."""


def read_reply(blob: bytes, handles: Sequence[Any], failed: bool, store: Store) -> Reply:
    """Decode the result of `Host.call`."""
    started, ended, parts, value = Decoder(blob, handles, store).load()
    value, error = (None, value) if failed else (value, None)
    return Reply(value, error, started, ended, parts)


def write_call(role: str, method: str, keep: bool, arguments: bytes) -> bytes:
    """Return the blob of a message.

    keep: whether the rank's result is collected. arguments: (args, kwargs) as an Encoder wrote
    them.
    """
    return pickle.dumps((role, method, keep), protocol=5) + arguments


def read_call(blob: bytes) -> tuple[tuple[str, str, bool], bytes]:
    """Return the inverse of `write_call`: ((role, method, keep), arguments)."""
    stream = io.BytesIO(blob)  # `load` stops where the first pickle ends
    return pickle.load(stream), stream.read()


class Host:
    """The host of one process's workers. `call` never raises: a worker's failure is a reply."""

    def __init__(self, pool: str, rank: int, members: Sequence[int], store: Store):
        """rank: in the pool. members: the ranks of its torch.distributed group, in their order."""
        self.pool = pool
        self.rank = rank
        # The controller may have a page of its own for this process.
        begin(os.environ.get(FOLDER), f"rank {rank} of pool {pool!r}")
        self.members = list(members)
        self.world = len(self.members)
        self.store = store
        self.device = torch.device("cpu")
        self.workers: dict[str, Worker] = {}
        self.shared: dict[str, Any] = {}
        """Objects that the workers share, by name."""
        self._joined = False
        self._server: StoreServer | None = None
        self._store: Any = None

    def serve(self, host: str, key: bytes) -> ServerRendezvous:
        """Let ranks on other machines meet here, at `host`, this machine's address, with `key`."""
        self._server = StoreServer(host, key)
        return self._server.rendezvous

    def join(
        self,
        rendezvous: FileRendezvous | ServerRendezvous | None,
        device: str,
        timeout_s: float = 600.0,
    ) -> None:
        """Join the torch.distributed group of `members` (NCCL with gloo on GPUs, gloo on CPUs).

        rendezvous: where they meet; None: there is one alone. timeout_s: how long a collective call
        may take. Raises HybridFlowError if the process is in a process group
        already.
        """
        device_name = device if device == "cpu" else f"cuda:{_local_device(self.rank)}"
        self.device = torch.device(device_name)
        backend = "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # cuDNN's attention makes a plan for each shape, and micro-batches rarely share one.
            torch.backends.cuda.enable_cudnn_sdp(False)
            backend = "cpu:gloo,cuda:nccl"

        self.shared[COLLECTIVE_TIMEOUT] = timedelta(seconds=timeout_s)

        # Pools of one rank may share the calling process, and so its group.
        if dist.is_initialized():
            if self.world == 1 and dist.get_world_size() == 1:
                return
            raise HybridFlowError(
                f"torch.distributed is initialised already, with {dist.get_world_size()} ranks"
            )

        # torch keeps no reference to a store that is written in Python.
        if rendezvous is None:
            self._store = dist.HashStore()
        else:
            self._store = rendezvous.store(self.world, timeout_s)
        dist.init_process_group(
            backend,
            rank=self.members.index(self.rank),
            world_size=self.world,
            timeout=timedelta(seconds=timeout_s),
            store=self._store,
        )
        self._joined = True

    def _close(self, role: str) -> None:
        worker = self.workers.pop(role, None)
        if worker is not None:
            worker.close()

    def leave(self) -> None:
        """Close every worker, and leave the torch.distributed group that `join` made."""
        for role in list(self.workers):
            self._close(role)

        # A process group that `join` did not make is kept.
        if self._joined and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if self._server is not None:
            self._server.close()

    def call(
        self, blob: bytes, handles: Sequence[Any], replies: Sequence[tuple]
    ) -> tuple[bytes, list[Any], bool]:
        """Run one message; return (blob, handles, failed) of the reply.

        replies: (blob, handles, failed) of each earlier call whose result the arguments name.
        """
        started = time.time()
        role = name = "?"  # until the message is read
        try:

            def resolve(at: int) -> Batch:
                blob, handles, failed = replies[at]
                reply = read_reply(blob, handles, failed, self.store)
                if reply.error is not None:
                    raise reply.error
                return reply.value

            (role, name, keep), arguments = read_call(blob)
            # Decoding, the method and encoding all may fail; each failure is a reply.
            with doing(f"{role}/{name}"):
                args, kwargs = Decoder(arguments, handles, self.store, resolve).load()
                result = self._method(role, name)(*args, **kwargs)
                return *self._encode(started, role, result if keep else None), False

        # An input of this call failed: the first failure is the one to report.
        except WorkerError as error:
            return *self._encode(started, role, error), True
        except BaseException as error:
            # Ctrl-C ends a run in the calling process; other ranks reply with it.
            if isinstance(error, KeyboardInterrupt) and self.world == 1:
                raise
            return *self._encode(started, role, self._failure(error, role, name)), True

    def _method(self, role: str, name: str) -> Callable:
        # Two methods are the host's own; a group calls them when it is made and closed.
        if name == "__create__":
            return lambda cls, *args: self.create(role, cls, *args)
        if name == "__delete__":
            return lambda: self._close(role)

        if role not in self.workers:
            raise HybridFlowError(
                f"there is no worker of role {role!r} here; its group was closed, "
                "or failed to build"
            )
        return getattr(self.workers[role], name)

    def create(
        self,
        role: str,
        cls: type[Worker],
        args: tuple,
        kwargs: dict,
        layout: ParallelLayout,
        generation: GenerationLayout | None,
        seed: int,
    ) -> None:
        """Build the worker of a role on this rank; `args` and `kwargs` follow its context.

        layout, generation: those of all ranks of the worker group.
        """
        # A torch.distributed group of some ranks knows of no others.
        if self.world < layout.world:
            layout = ParallelLayout(dp=self.world)
            if generation is not None:
                sizes = (generation.pp, generation.tp)
                generation = generation_layout(layout, *sizes, "consecutive")
        context = RankContext(
            role,
            self.members.index(self.rank),
            layout,
            self.device,
            seed,
            generation,
            self.store,
            self.shared,
            pool_rank=self.rank,
        )
        self.workers[role] = cls(context, *args, **kwargs)

    def _encode(self, started: float, role: str, value: Any) -> tuple[bytes, list[Any]]:
        parts: tuple[Part, ...] = ()
        if role in self.workers:
            parts = self.workers[role].context.take_parts()
        encoder = Encoder(self.store)
        return encoder.dumps((started, time.time(), parts, value)), encoder.handles

    def _failure(self, error: BaseException, role: str, phase: str) -> WorkerError:
        """Return the error for the reply: a WorkerError with role, phase, rank and traceback.

        A WorkerError that has them already is returned unchanged.
        """
        if isinstance(error, WorkerError):
            return error
        if not isinstance(error, HybridFlowError):
            text = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
        else:
            # The message is enough for these; other errors need the traceback.
            text = str(error)
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            # What the system refuses (a full disk, say) is no fault of any code.
            known = isinstance(cause, HybridFlowError | OSError) or isinstance(error, DamagedError)
            trace = "" if known else "".join(traceback.format_exception(cause, chain=False))
        cls = DamagedPartError if isinstance(error, DamagedError) else WorkerError
        return cls(text, role=role, phase=phase, rank=self.rank, remote_traceback=trace)


def _local_device(rank: int) -> int:
    return rank % max(torch.cuda.device_count(), 1)
