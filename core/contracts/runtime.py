"""The contract of runtimes: processes that host workers, messages between them, a store for what is large."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol as Typing

import attrs

from hybridflow.core.contracts.capabilities import RuntimeCapabilities


@attrs.frozen
class ResourcePool:
    """A set of devices. Models placed in one pool share its processes; pools run side by side.

    `devices_per_node=(8, 8)` is two nodes with eight devices; one process per device.
    """

    name: str
    devices_per_node: tuple[int, ...] = (1,)

    @property
    def world(self) -> int:
        return sum(self.devices_per_node)


@attrs.frozen(eq=False)
class Label:
    """One call, as runtimes tell of it; all ranks of the call have the same object."""

    role: str
    phase: str


@attrs.frozen
class Message:
    """A call for one process: (see core/groups/wire.py) a blob, handles into the store, and replies that must arrive first."""

    blob: bytes
    handles: Sequence[Any] = ()
    replies: Sequence[Any] = ()


@attrs.define
class Traffic:
    """Bytes through the controller since the last `take`: messages out and in, and columns fetched to be read."""

    sent: int = 0
    received: int = 0
    fetched: int = 0

    def take(self) -> dict[str, int]:
        values = attrs.asdict(self)
        self.sent = self.received = self.fetched = 0
        return values

    @property
    def total(self) -> int:
        return self.sent + self.received + self.fetched


class Process(ABC):
    """One process of a pool: hosts a core.groups.host.Host and runs its messages one after the other, in the order sent."""

    pool: ResourcePool
    rank: int

    @abstractmethod
    def submit(self, message: Message, label: Label) -> Any:
        """Send a call; return at once with a reference to the reply (hashable; other messages may name it)."""


class RuntimeSettings:
    """Base of a runtime's `Config`."""

    remote: bool = False
    """Whether processes may start on other machines than the controller's."""


def runtime_settings(config: Any) -> RuntimeSettings:
    """A runtime's config where it says what it needs, else what the base says."""
    return config if isinstance(config, RuntimeSettings) else RuntimeSettings()


class Store(Typing):
    """Where blocks of arrays are left for other processes."""

    def put(self, block: list[Any]) -> Any:
        """Leave a block; a handle that travels."""

    def get(self, handle: Any) -> list[Any]:
        """The block behind a handle, not to be changed."""


class Runtime(ABC):
    """A plugin of kind "runtime"."""

    Config: ClassVar[type | None] = None
    """Its settings: a frozen attrs class derived from RuntimeSettings."""
    capabilities: ClassVar[RuntimeCapabilities] = RuntimeCapabilities()
    """Of a plugin that is registered in one line; a Descriptor has its own."""

    def __init__(self, config: Any):
        self.config = config
        self.traffic = Traffic()

    @abstractmethod
    def start(self) -> None:
        """Connect or start what processes need. Raises HybridFlowError with what to do."""

    @abstractmethod
    def launch(self, pool: ResourcePool, device: str, environment: dict[str, str]) -> list[Process]:
        """One process per device of the pool, each with a Host that has joined the pool's torch.distributed group."""

    @abstractmethod
    def wait(self, reply: Any) -> tuple[bytes, Sequence[Any], bool]:
        """The reply's (blob, handles, failed), as Host.call made it.

        Raises WorkerDied if its process, or one that it may wait for, is gone. Where it may never come because a rank
        of some call failed while its peers wait for that rank, the failed reply is given in its place.
        """

    @abstractmethod
    def check_alive(self) -> None:
        """Raise WorkerDied if a process is gone; may take some seconds.

        Asked after a failure, since a rank that lost its peer fails too.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End every process that this runtime started; safe to call twice."""

    # The Store, as the controller sees it
    @abstractmethod
    def put(self, block: list[Any]) -> Any: ...
    @abstractmethod
    def get(self, handle: Any) -> list[Any]: ...
