"""The contract of runtimes: processes that host workers, messages to them, and an object store.

controller --Message-->  Process (one per device of a pool; runs its messages in order)
           <--reply----
                         Store (large arrays, left by one process and fetched by another)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol as Typing

import attrs

from hybridflow.core.contracts.capabilities import RuntimeCapabilities
from hybridflow.core.processes.look import Look, kill, looks


@attrs.frozen
class ResourcePool:
    """A named set of processes, one per device.

    The roles placed in a pool share its processes; pools run in parallel. For example,
    `devices_per_node=(8, 8)` stands for two nodes with eight devices each.
    """

    name: str
    devices_per_node: tuple[int, ...] = (1,)
    device: str | None = None
    """ "cpu" for a pool of reward functions, without models; None: the run's device."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """The ranks of each torch.distributed group, in its order; None: all are in one."""

    @property
    def world(self) -> int:
        """The number of processes."""
        return sum(self.devices_per_node)

    @property
    def process_groups(self) -> tuple[tuple[int, ...], ...]:
        """`groups`, also where it is None."""
        return (tuple(range(self.world)),) if self.groups is None else self.groups

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's torch.distributed group."""
        return next(group for group in self.process_groups if rank in group)


@attrs.frozen(eq=False)
class Label:
    """The name of one call in a runtime's reports.

    All ranks of a call have the same object, by which a runtime knows the replies of one call.
    """

    role: str
    phase: str


@attrs.frozen
class Message:
    """Carries one call to one process, encoded by core/groups/wire.py."""

    blob: bytes
    handles: Sequence[Any] = ()
    """Handles of the blocks in the store that the call reads."""
    replies: Sequence[Any] = ()
    """Replies that must arrive before the call can run."""


@attrs.define
class Traffic:
    """Bytes that passed through the controller since the last `take`."""

    sent: int = 0
    """Bytes of messages to processes."""
    received: int = 0
    """Bytes of replies."""
    fetched: int = 0
    """Bytes of columns that the controller fetched to read them."""

    def take(self) -> dict[str, int]:
        """Return the counts and reset them to 0."""
        counts = attrs.asdict(self)
        self.sent = self.received = self.fetched = 0
        return counts

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.sent + self.received + self.fetched


class Process(ABC):
    """One process of a pool: it holds a core.groups.host.Host and runs its messages in order."""

    pool: ResourcePool
    rank: int
    place: tuple[str, int] | None = None
    """The name of its machine and its number there, once it has started."""
    expendable = False
    """Whether its end is told to those alone who wait for replies of its torch.distributed group:
    other processes may take their places."""

    @abstractmethod
    def submit(self, message: Message, label: Label) -> Any:
        """Send a call; return at once with a reference to the reply.

        The reference is hashable, and other messages may name it.
        """


class RuntimeSettings:
    """Base of a runtime's `Config`."""

    remote: bool = False
    """Whether processes may start on other machines than the controller's."""


def runtime_settings(config: Any) -> RuntimeSettings:
    """Return a runtime's config if it derives from RuntimeSettings, else the defaults."""
    return config if isinstance(config, RuntimeSettings) else RuntimeSettings()


class Store(Typing):
    """A store in which blocks of arrays are left for other processes."""

    def put(self, block: list[Any]) -> Any:
        """Leave a block; return a handle that can be sent to other processes."""

    def get(self, handle: Any) -> list[Any]:
        """Return the block behind a handle, not to be changed."""


class Runtime(ABC):
    """A plugin of kind "runtime"."""

    Config: ClassVar[type | None] = None
    """Its settings: a frozen attrs class derived from RuntimeSettings."""
    capabilities: ClassVar[RuntimeCapabilities] = RuntimeCapabilities()
    """Capabilities of a plugin that is registered in one line; a Descriptor has its own."""

    def __init__(self, config: Any):
        self.config = config
        self.traffic = Traffic()

    # --- processes ---

    @abstractmethod
    def start(self) -> None:
        """Connect to the cluster, or start the services that processes need.

        Raises HybridFlowError, whose message has the remedy.
        """

    @abstractmethod
    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        """Start one process per device of the pool.

        Each gets a Host that joins its torch.distributed group (`pool.groups`). May return before
        that, so that pools start at the same time: calls to the processes wait for it.
        """

    def started(self) -> None:  # noqa: B027
        """Wait until all processes that were launched have joined their groups.

        Raises HybridFlowError where one does not start, or not in time.
        """

    @abstractmethod
    def check_alive(self) -> None:
        """Raise WorkerDied if a process has ended, unless it is expendable.

        It is called after a failure, since a rank whose peer has died fails too. This may take some
        seconds.
        """

    def ended(self, processes: Sequence[Process]) -> list[Process]:
        """Return which of these processes have ended; this may take some seconds."""
        return []

    def replace(self, processes: Sequence[Process]) -> list[Process]:
        """Start processes in the places of expendable ones, which are ended if they have not.

        They are all those of a torch.distributed group; the new ones make one too, and have no
        workers. Returns before they have started; calls to them wait for that.
        """
        raise NotImplementedError(f"{type(self).__name__} replaces no processes")

    @abstractmethod
    def shutdown(self) -> None:
        """End every process that this runtime started; safe to call twice."""

    # --- replies ---

    @abstractmethod
    def wait(self, reply: Any) -> tuple[bytes, Sequence[Any], bool]:
        """Wait for a reply; return its (blob, handles, failed), as Host.call made it.

        Raises WorkerDied if its process has ended, or one that it may wait for: any that is not
        expendable, and those of its torch.distributed group that run the same call.

        A rank that failed leaves its peers waiting in a collective call, and their replies never
        come. Its failed reply is then returned instead of theirs.
        """

    def first(self, replies: Sequence[Any]) -> Any:
        """Wait until one of these replies can be waited for without delay; return it.

        A runtime that cannot tell returns the first of them. Raises as `wait` does, and returns the
        first too where its own `wait` will tell why it never comes.
        """
        return replies[0]

    # --- what the processes do: all of these may be called from any thread ---

    def at_work(self) -> Sequence[tuple[Process, Label]]:
        """Return which call each process works on; none of those that wait for one."""
        return ()

    def lost(self) -> str | None:
        """Return which part of the runtime itself has ended, and how; None: all are there."""
        return None

    def look(self, folder: Path, stacks: bool = False) -> list[Look]:
        """Return what the run's processes do, on all machines, by their pages in a folder.

        stacks: with the stacks of their threads, of those that answer.
        """
        return looks(folder, stacks)

    def kill(self, look: Look) -> None:
        """End a process at once, even a stopped one; one that has ended is no error."""
        kill(look)

    # --- the store (Store) of the controller ---

    @abstractmethod
    def put(self, block: list[Any]) -> Any:
        """Leave a block; return its handle."""

    @abstractmethod
    def get(self, handle: Any) -> list[Any]:
        """Return the block behind a handle, not to be changed."""
