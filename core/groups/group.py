"""A worker group: N ranks that run one program, called from the controller like one object.

The path of a call and its result. Only descriptions of batches pass through the controller; columns
travel from rank to rank through the runtime's store, when they are read.

    controller                                           process of a rank (host.py)
    ----------                                           ---------------------------
    group.update(batch)
      |  select the columns that the method reads
      |  protocol.distribute: one piece per rank
      |  Encoder: piece -> Message
      |        (blob, handles, replies)
      |  Outbox: at once, or at the turn of the step that makes the call
      +-- process.submit ----------- blob ------------>  Host.call
      |                                                    |  Decoder: blob -> arguments
      v  at once                                           |  worker.update(*arguments)
    Batch (of PromisedTables) or Future                    |  Encoder: result -> blob, handles
      |                                                    v
      +-- PendingReply.read <------- blob -------------  reply
      |        raises the rank's WorkerError               :  columns larger than INLINE_BYTES
      v                                                    v
    protocol.collect:                                    store, whose objects the controller
      results of the sources -> one value                and the ranks read by their handles

A promised Batch can be an argument of the next call before it exists: its message names the reply,
and the runtime delivers that reply before the call starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from hybridflow.core.contracts.protocol import GroupShape, Protocol, TransferProtocol
from hybridflow.core.contracts.runtime import Label, Process, ResourcePool, Runtime
from hybridflow.core.contracts.worker import Worker
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.host import write_call
from hybridflow.core.groups.methods import Method, methods_of
from hybridflow.core.groups.outbox import Call, Outbox, Outgoing, PendingReply
from hybridflow.core.groups.wire import Encoder
from hybridflow.core.values.batch import Batch, PromisedTable, View
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout


class Future:
    """The result of a call that does not return a Batch."""

    def __init__(self, results: Callable[[], Any], replies: Sequence[PendingReply] = ()):
        self._results: Callable[[], Any] | None = results
        self._value: Any = None
        self.replies = replies
        """Those of the call's ranks."""

    def result(self) -> Any:
        """Wait for the call and return its value.

        Raises the WorkerError of the first rank that failed.
        """
        if self._results is not None:
            self._value = self._results()
            self._results = None  # frees the replies
        return self._value


@attrs.frozen(eq=False)
class Pool:
    """A launched ResourcePool: its processes, which the roles of the pool share."""

    spec: ResourcePool
    processes: list[Process]
    runtime: Runtime

    @classmethod
    def launch(
        cls,
        spec: ResourcePool,
        runtime: Runtime,
        device: str = "cpu",
        environment: dict[str, str] | None = None,
        wait: bool = True,
    ) -> Pool:
        """Start one process per device of `spec`, with these additional environment variables.

        Without `wait`, `runtime.started()` is called by the caller, after its last pool.
        """
        pool = cls(spec, list(runtime.launch(spec, device, environment or {})), runtime)
        if wait:
            runtime.started()
        return pool

    def replace(self, ranks: Sequence[int]) -> None:
        """Start processes in the places of expendable ones, which are a group of `spec.groups`.

        Their calls are lost, and worker groups must make their workers anew.
        """
        fresh = self.runtime.replace([self.processes[rank] for rank in ranks])
        for rank, process in zip(ranks, fresh, strict=True):
            self.processes[rank] = process
            process.expendable = True


class WorkerGroup:
    """`WorkerGroup(EchoWorker, pool)` makes one EchoWorker per rank.

    The methods that EchoWorker registers become methods of the group. A call returns at once:
    with a Batch (by reference) if the method is annotated `-> Batch`, else with a Future.
    `layout` defaults to pure data parallelism over the pool. Raises HybridFlowError when layout
    and pool differ in size, or when the worker registers a name that every group has.
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
        watch: Callable[[Call], None] | None = None,
        extras: Sequence[str] = (),
        writes: Mapping[str, Sequence[str]] | None = None,
        outbox: Outbox | None = None,
        **kwargs: Any,
    ):
        """Build the workers, and wait for that; `args` and `kwargs` are their arguments.

        name: the role's name, by default the class's. watch: called for every reply that is read.
        extras: columns that these workers read beside those that their methods name, where a batch
        has them. writes: method -> the columns of its result, where they depend on these workers'
        arguments. outbox: shared with the other groups of a session.
        """
        self.name = name or worker.__name__
        self.pool = pool
        self.worker = worker
        self.layout = layout or ParallelLayout(dp=pool.spec.world)
        self.generation = generation
        if self.layout.world != pool.spec.world:
            raise HybridFlowError(
                f"the layout of {self.name!r} ({self.layout}) has {self.layout.world} ranks, and "
                f"its pool {pool.spec.name!r} has {pool.spec.world} devices; they must be equal"
            )

        # A method's name must not hide an attribute that every group has.
        self.methods = methods_of(worker)
        self.runtime = pool.runtime
        self.outbox = outbox or Outbox()
        self._watch = watch
        self._extras = tuple(extras)
        for name, columns in (writes or {}).items():
            self.methods[name] = attrs.evolve(self.methods[name], writes=columns)
        reserved = [
            method
            for method in self.methods
            if method in vars(self) or hasattr(WorkerGroup, method)
        ]
        if reserved:
            raise HybridFlowError(
                f"{worker.__name__} registers {reserved[0]!r}, which every group has; "
                "name it otherwise"
            )

        self._made = (worker, args, kwargs, self.layout, generation, seed)
        self._send(_host_method("__create__"), self._made, {}).result()

    def renew(self, ranks: Sequence[int]) -> Future:
        """Make the workers of ranks anew, whose processes have taken the places of others."""
        create = attrs.evolve(_host_method("__create__"), protocol=_Only(ranks))
        renewed: Future = self._send(create, self._made, {})
        return renewed

    # Methods of the workers, beside those of this class
    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the registered method of that name, as a function that calls the group."""
        methods = self.__dict__.get("methods", {})  # not self.methods: it may not be set yet
        if name not in methods:
            raise AttributeError(
                f"group {self.__dict__.get('name')!r} has no method {name!r}; registered are "
                f"{', '.join(methods) or 'none'}"
            )
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method on the ranks that its protocol names."""
        return self._send(self.methods[name], args, kwargs)

    def call_on(self, ranks: Sequence[int], name: str, *args: Any) -> Any:
        """Call a registered method on these ranks alone; the result is that of the first one.

        Each gets all of the arguments.
        """
        return self._send(attrs.evolve(self.methods[name], protocol=_Only(ranks)), args, {})

    def close(self) -> None:
        """Drop the workers of this group; its processes stay for the other groups of the pool."""
        self._send(_host_method("__delete__"), (), {}).result()

    def _send(self, method: Method, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Send one call to its ranks; return the Batch or Future of its result."""
        protocol = method.protocol

        # Columns that the method does not read are not sent.
        promised = method.promised(args, kwargs)
        columns = method.columns(args, kwargs)
        if columns is not None:
            columns = [*columns, *self._extras]
            args = [_select(value, columns) for value in args]
            kwargs = {key: _select(value, columns) for key, value in kwargs.items()}

        # One entry per rank for each argument, then the arguments of each rank.
        positional = [self._distribute(protocol, value) for value in args]
        named = {key: self._distribute(protocol, value) for key, value in kwargs.items()}
        called = list(protocol.called(self))
        sources = list(protocol.sources(self))
        if uncalled := set(sources).difference(called):
            raise HybridFlowError(
                f"protocol {protocol.name} collects the result of rank {min(uncalled)}, "
                "which it never calls"
            )
        pieces: dict[int, tuple] = {}
        for rank in called:
            rank_kwargs = {key: per_rank[rank] for key, per_rank in named.items()}
            pieces[rank] = ([per_rank[rank] for per_rank in positional], rank_kwargs)

        # Rows are encoded one by one, so that the first rank starts while others' messages are
        # written. Other arguments are anything: one that cannot be sent fails before a rank starts.
        outgoing = self._outgoing(method, pieces, set(sources))
        if not protocol.splits:
            outgoing = iter(list(outgoing))

        # Submitting does not wait: the replies are read when the result is.
        pending: dict[int, PendingReply] = {}
        noted = _noting(outgoing, pending)
        self.outbox.post(self.pool.spec.name, noted, method.early, method.late)
        return self._collect(method, promised, pieces, pending, sources)

    def _outgoing(
        self, method: Method, pieces: dict[int, tuple], sources: set[int]
    ) -> Iterator[Outgoing]:
        """Yield one message per rank.

        Ranks with the same arguments share one encoding, and so the objects in the store.
        """
        encoded: dict[tuple, tuple] = {}
        label = Label(self.name, method.name)
        for rank, piece in pieces.items():
            key = _identity(piece)
            if key not in encoded:
                encoder = Encoder(self.runtime)
                encoded[key] = (encoder.dumps(piece), encoder.handles, encoder.replies)

            arguments, handles, inputs = encoded[key]
            blob = write_call(self.name, method.name, rank in sources, arguments)
            call = Call(
                self.pool.spec.name,
                rank,
                self.name,
                method.name,
                time.time(),
                tuple(reply.call for reply in inputs),
                step=self.outbox.step,
            )
            reply = PendingReply(self.runtime, self.outbox, call, self._watch)
            yield Outgoing(self.pool.processes[rank], blob, handles, inputs, label, reply)

    def _distribute(self, protocol, value: Any) -> Sequence[Any]:
        """Distribute a value, and the batches inside lists, tuples and dicts.

        Returns one entry per rank.
        """
        container = protocol.splits and isinstance(value, (list, tuple, dict)) and _batches(value)
        if not container:
            return protocol.distribute(self, value)

        # Ranks with equal entries share one object, so that one encoding serves them.
        parts = [self._distribute(protocol, entry) for entry in _entries(value)]
        rebuilt: dict[tuple, Any] = {}
        pieces = []
        for rank in range(self.layout.world):
            entries = [part[rank] for part in parts]
            key = tuple(map(id, entries))
            if key not in rebuilt:
                rebuilt[key] = _rebuilt(value, entries)
            pieces.append(rebuilt[key])
        return pieces

    def _collect(
        self,
        method: Method,
        promised: tuple[str, ...] | None,
        pieces: dict[int, tuple],
        pending: dict[int, PendingReply],
        sources: Sequence[int],
    ) -> Any:
        """Return the call's result from the sources' replies: a Batch of promises, or a Future."""
        if not method.returns_batch:

            def results() -> Any:
                for reply in pending.values():  # any failing rank fails the call, collected or not
                    reply.read()
                return method.protocol.collect(self, [pending[rank].value() for rank in sources])

            return Future(results, list(pending.values()))

        # One promise per source; `collect` joins them by reference.
        peers = _peers(pieces, sources)
        batches = []
        for rank in sources:
            # The row count is known before the result is, where the method keeps its input's rows.
            rows = None
            if method.same_rows:
                args, kwargs = pieces[rank]
                inputs = _batches([*args, *kwargs.values()])
                rows = inputs[0].known_rows if inputs else None

            peer_replies = [pending[peer] for peer in peers[rank]]
            result = partial(_read_batch, method.name, pending[rank], peer_replies)
            table = PromisedTable(result, rows, promised, pending[rank])
            batches.append(Batch.of_views([View((table,))]))
        return method.protocol.collect(self, batches)


class _Only(TransferProtocol):
    """Sends the same to some ranks, and returns the result of the first one."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = ranks

    def called(self, group: GroupShape) -> Sequence[int]:
        return self.ranks

    def sources(self, group: GroupShape) -> Sequence[int]:
        return self.ranks[:1]

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        return results[0]


def _noting(outgoing: Iterator[Outgoing], pending: dict[int, PendingReply]) -> Iterator[Outgoing]:
    """Yield the same, and note the reply of each rank in `pending`."""
    for one in outgoing:
        pending[one.reply.call.rank] = one.reply
        yield one


def replies_of(batch: Batch) -> list[PendingReply]:
    """Return the replies that the batch is promised by, one for each rank that sends a part."""
    tables = (table for view in batch.views for table in view.tables)
    return [
        table.reply
        for table in tables
        if isinstance(table, PromisedTable) and table.reply is not None
    ]


def is_held(batch: Batch) -> bool:
    """Return whether the call that the batch is promised by waits for the turn of its step."""
    return any(reply.held for reply in replies_of(batch))


def _host_method(name: str) -> Method:
    """Return a method of every host (host.py), which workers need not register."""
    return Method(name, Protocol.ONE_TO_ALL, False, False, None, None)


def _read_batch(method: str, reply: PendingReply, peers: Sequence[PendingReply]) -> Batch:
    """Wait for a promised batch, and for its peers' replies; a peer's failure is raised too."""
    value = reply.value()

    # The peers' values are dropped; a failure is raised here.
    for peer in peers:
        peer.read()

    if not isinstance(value, Batch):
        raise HybridFlowError(
            f"method {method!r} is annotated -> Batch and returned {type(value).__name__}"
        )
    return value


def _identity(piece: tuple) -> tuple[int, ...]:
    """Return the object ids of a rank's (args, kwargs), equal where ranks get the same objects."""
    args, kwargs = piece
    return (*map(id, args), *map(id, kwargs.values()))


def _peers(pieces: dict[int, tuple], sources: Sequence[int]) -> dict[int, list[int]]:
    """Return source -> the ranks that work on the same pieces and whose results are not collected.

    A failure of such a rank counts as a failure of its source.
    """
    # If several sources have the same pieces, the first one gets the peers.
    keys = {rank: _identity(piece) for rank, piece in pieces.items()}
    source_of = {keys[rank]: rank for rank in reversed(sources)}
    peers: dict[int, list[int]] = {rank: [] for rank in sources}
    for rank, key in keys.items():
        if rank not in peers:
            peers[source_of.get(key, sources[0])].append(rank)
    return peers


def _entries(value: list | tuple | dict) -> list:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _rebuilt(value: list | tuple | dict, entries: list) -> Any:
    """Return a container of the type of `value`, with its keys or fields, and these entries."""
    # A named tuple takes its entries one by one, other containers as one list.
    if isinstance(value, dict):
        return dict(zip(value, entries, strict=True))
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _batches(value: Any) -> list[Batch]:
    """Return the batches in a value, and in its lists, tuples and dicts."""
    if isinstance(value, Batch):
        return [value]

    batches = []
    if isinstance(value, (list, tuple, dict)):
        for entry in _entries(value):
            batches += _batches(entry)
    return batches


def _select(value: Any, columns: Sequence[str]) -> Any:
    """Return the value, with only these columns of each batch in it."""
    if isinstance(value, Batch):
        return value.select(columns)
    if isinstance(value, (list, tuple, dict)) and _batches(value):
        return _rebuilt(value, [_select(entry, columns) for entry in _entries(value)])
    return value
