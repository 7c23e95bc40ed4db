"""A worker group: N ranks that run one program, called from the controller as if they were one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import Label, Message, Process, ResourcePool, Runtime
from hybridflow.core.contracts.worker import Worker
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.host import Reply, read_reply, write_call
from hybridflow.core.groups.methods import Method, methods_of
from hybridflow.core.groups.wire import Encoder
from hybridflow.core.values.batch import Batch, PromisedTable, View
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout


class Future:
    """The result of a call that does not return a Batch."""

    def __init__(self, results: Callable[[], Any]):
        self._results: Callable[[], Any] | None = results
        self._value: Any = None

    def result(self) -> Any:
        """Wait; raises the WorkerError of the first rank that failed."""
        if self._results is not None:
            self._value, self._results = self._results(), None
        return self._value


class PendingReply:
    """One rank's reply, read at most once."""

    def __init__(self, runtime: Runtime, reference: Any, watch: Callable[[Reply], None] | None):
        self.runtime, self.reference, self.watch = runtime, reference, watch
        self._reply: Reply | None = None

    def read(self) -> Reply:
        if self._reply is None:
            blob, handles, failed = self.runtime.wait(self.reference)
            self.runtime.traffic.received += len(blob)
            if failed:
                self.runtime.check_alive()  # a rank that lost its peer fails too; the loss is what matters
            self._reply = read_reply(blob, handles, failed, _Counted(self.runtime))
            if self.watch is not None:
                self.watch(self._reply)
        if self._reply.error is not None:
            raise self._reply.error
        return self._reply

    def value(self) -> Any:
        return self.read().value


class _Counted:
    """The runtime's store, counting what the controller fetches."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def put(self, block: list) -> Any:
        return self.runtime.put(block)

    def get(self, handle: Any) -> list:
        block = self.runtime.get(handle)
        self.runtime.traffic.fetched += sum(a.nbytes for a in block)
        return block


class Pool:
    """A launched ResourcePool: its processes."""

    def __init__(self, spec: ResourcePool, processes: Sequence[Process], runtime: Runtime):
        self.spec, self.processes, self.runtime = spec, processes, runtime

    @classmethod
    def launch(
        cls,
        spec: ResourcePool,
        runtime: Runtime,
        device: str = "cpu",
        environment: dict[str, str] | None = None,
    ) -> Pool:
        return cls(spec, runtime.launch(spec, device, environment or {}), runtime)


class WorkerGroup:
    """`WorkerGroup(EchoWorker, pool)` makes one EchoWorker per rank; its registered methods are methods of the group.

    A call returns at once: with a Batch (by reference) if the method is annotated `-> Batch`, else with a Future.
    `layout` defaults to pure data parallelism over the pool. Raises HybridFlowError when sizes do not fit.
    """

    def __init__(
        self,
        worker: type[Worker],
        pool: Pool,
        *args: Any,
        layout: ParallelLayout | None = None,
        generation: GenerationLayout | None = None,
        name: str | None = None,
        seed: int = 0,
        watch: Callable[[str, str, int, Reply], None] | None = None,
        extras: Sequence[str] = (),
        **kwargs: Any,
    ):
        """`extras`: columns that these workers read beside those that their methods name, where a batch has them."""
        self.name, self.pool, self.worker = name or worker.__name__, pool, worker
        self.layout, self.generation = layout or ParallelLayout(dp=pool.spec.world), generation
        if self.layout.world != pool.spec.world:
            raise HybridFlowError(
                f"the layout of {self.name!r} ({self.layout}) has {self.layout.world} ranks, and its pool "
                f"{pool.spec.name!r} has {pool.spec.world} devices; they must be equal"
            )
        self.methods = methods_of(worker)
        self.runtime = pool.runtime
        self._watch, self._extras = watch, tuple(extras)
        if taken := [n for n in self.methods if n in vars(self) or hasattr(WorkerGroup, n)]:
            raise HybridFlowError(
                f"{worker.__name__} registers {taken[0]!r}, which every group has; name it otherwise"
            )
        create = Method("__create__", Protocol.ONE_TO_ALL, False, False, None, None)
        self._send(create, (worker, args, kwargs, self.layout, generation, seed), {}).result()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("methods", {})
        if name not in methods:
            raise AttributeError(
                f"group {self.__dict__.get('name')!r} has no method {name!r}; registered are "
                f"{', '.join(methods) or 'none'}"
            )
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method on the ranks that its protocol names."""
        return self._send(self.methods[name], args, kwargs)

    def close(self) -> None:
        """Drop the workers of this group; its processes stay for the other groups of the pool."""
        self._send(
            Method("__delete__", Protocol.ONE_TO_ALL, False, False, None, None), (), {}
        ).result()

    def _send(self, method: Method, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        protocol = method.protocol
        columns = method.columns(args, kwargs)
        if columns is not None:
            columns = [*columns, *self._extras]
            args = [_select(a, columns) for a in args]
            kwargs = {k: _select(v, columns) for k, v in kwargs.items()}
        positional = [self._distribute(protocol, a) for a in args]
        named = {k: self._distribute(protocol, v) for k, v in kwargs.items()}
        called, sources = list(protocol.called(self)), list(protocol.sources(self))
        if strange := [r for r in sources if r not in called]:
            raise HybridFlowError(
                f"protocol {protocol.name} collects the result of rank {strange[0]}, which it never calls"
            )
        pieces = {
            r: ([p[r] for p in positional], {k: v[r] for k, v in named.items()}) for r in called
        }
        messages: Iterable[Message] = self._messages(method, pieces, set(sources))
        if not protocol.splits:
            messages = list(messages)  # what cannot be sent is found before any rank starts
        label, pending = Label(self.name, method.name), {}
        for rank, message in zip(called, messages, strict=True):
            self.runtime.traffic.sent += len(message.blob)
            reference = self.pool.processes[rank].submit(message, label)
            pending[rank] = PendingReply(self.runtime, reference, self._watcher(method.name, rank))
        return self._collect(method, pieces, pending, sources)

    def _messages(
        self, method: Method, pieces: dict[int, tuple], sources: set[int]
    ) -> Iterable[Message]:
        """One per rank; ranks that get the same pieces share what is encoded, and so the objects in the store."""
        made: dict[tuple, tuple] = {}
        for rank, (args, kwargs) in pieces.items():
            key = (*map(id, args), *map(id, kwargs.values()))
            if key not in made:
                encoder = Encoder(self.runtime)
                blob = encoder.dumps((args, kwargs))
                made[key] = (blob, encoder.handles, [r.reference for r in encoder.replies])
            blob, handles, replies = made[key]
            yield Message(
                write_call(self.name, method.name, rank in sources, blob), handles, replies
            )

    def _distribute(self, protocol, value: Any) -> Sequence[Any]:
        """Distribute a value, and the batches inside lists, tuples and dicts."""
        if protocol.splits and isinstance(value, (list, tuple, dict)) and _batches(value):
            parts = [self._distribute(protocol, v) for v in _entries(value)]
            made: dict[
                tuple, Any
            ] = {}  # ranks with equal pieces share one object, so one message serves them
            keys = [tuple(id(p[r]) for p in parts) for r in range(self.layout.world)]
            for rank, key in enumerate(keys):
                if key not in made:
                    made[key] = _rebuilt(value, [p[rank] for p in parts])
            return [made[key] for key in keys]
        return protocol.distribute(self, value)

    def _collect(
        self, method: Method, pieces: dict[int, tuple], pending: dict[int, PendingReply], sources
    ) -> Any:
        if not method.returns_batch:

            def results() -> Any:
                for reply in pending.values():  # any failing rank fails the call, collected or not
                    reply.read()
                return method.protocol.collect(self, [pending[rank].value() for rank in sources])

            return Future(results)
        peers = _peers(pieces, sources)
        batches = []
        for rank in sources:

            def result(
                reply: PendingReply = pending[rank], peers=tuple(pending[r] for r in peers[rank])
            ) -> Batch:
                value = reply.value()
                for peer in peers:
                    peer.read()
                if not isinstance(value, Batch):
                    raise HybridFlowError(
                        f"method {method.name!r} is annotated -> Batch and returned {type(value).__name__}"
                    )
                return value

            inputs = (
                _batches(list(pieces[rank][0]) + list(pieces[rank][1].values()))
                if method.same_rows
                else []
            )
            rows = inputs[0].known_rows if inputs else None
            table = PromisedTable(result, rows, method.writes, pending[rank])
            batches.append(Batch.of_views([View((table,))]))
        return method.protocol.collect(self, batches)

    def _watcher(self, method: str, rank: int) -> Callable[[Reply], None] | None:
        watch = self._watch
        return None if watch is None else lambda reply: watch(self.name, method, rank, reply)


def _peers(pieces: dict[int, tuple], sources: Sequence[int]) -> dict[int, list[int]]:
    """source -> the ranks whose results do not count and that work on the same pieces: their failures are its own."""
    keys = {
        rank: (*map(id, args), *map(id, kwargs.values())) for rank, (args, kwargs) in pieces.items()
    }
    by_key = {keys[rank]: rank for rank in reversed(sources)}
    peers: dict[int, list[int]] = {rank: [] for rank in sources}
    for rank, key in keys.items():
        if rank not in peers:
            peers[by_key.get(key, sources[0])].append(rank)
    return peers


def _entries(value: list | tuple | dict) -> list:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _rebuilt(value: list | tuple | dict, entries: list) -> Any:
    if isinstance(value, dict):
        return dict(zip(value, entries, strict=True))
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _batches(value: Any) -> list[Batch]:
    """The batches in it, and in its lists, tuples and dicts."""
    if isinstance(value, Batch):
        return [value]
    return (
        [b for v in _entries(value) for b in _batches(v)]
        if isinstance(value, (list, tuple, dict))
        else []
    )


def _select(value: Any, columns: Sequence[str]) -> Any:
    if isinstance(value, Batch):
        return value.select(columns)
    if isinstance(value, (list, tuple, dict)) and _batches(value):
        return _rebuilt(value, [_select(v, columns) for v in _entries(value)])
    return value
