"""The Ray actor that hosts one rank of a pool.

It sets the environment before torch is imported, because torch reads its thread count on import.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from hybridflow.core.groups.rendezvous import FileRendezvous, ServerRendezvous


class RayStore:
    """The object store of Ray.

    Blocks are read without a copy, so their arrays are read-only; core/groups/wire.py copies them
    where it returns tensors.
    """

    def put(self, block: list) -> Any:
        """Leave a block of arrays; return its object reference."""
        return ray.put(block)

    def get(self, handle: Any) -> list:
        """Return the block behind an object reference, read-only."""
        return ray.get(handle)


def unpacked(reply: bytes | tuple) -> tuple[bytes, Sequence[Any], bool]:
    """Return (blob, handles, failed) of a reply as `HostActor.call` sends it.

    Most replies are a blob alone, since Ray sends bytes without pickling them.
    """
    return (reply, (), False) if isinstance(reply, bytes) else reply


@ray.remote(max_restarts=0, max_task_retries=0)
class HostActor:
    """One process of a pool, with the Host of its workers."""

    def __init__(
        self,
        pool: str,
        rank: int,
        members: Sequence[int],
        environment: dict[str, str],
        path: list[str],
    ):
        """members: the ranks of its process group. environment: variables to set. path: the
        controller's sys.path, so that workers defined in its folders can be imported here."""
        os.environ.update(environment)
        sys.path.extend(folder for folder in path if folder not in sys.path)

        # Only now: these modules import torch.
        from hybridflow.core.groups.host import Host
        from hybridflow.kit.memory import keep_freed_memory

        keep_freed_memory()
        self.host = Host(pool, rank, members, RayStore())

    def serve(self, key: bytes) -> ServerRendezvous:
        """Let the ranks of its group meet here, at this node's address (see Host.serve)."""
        return self.host.serve(ray.util.get_node_ip_address(), key)

    def join(
        self, rendezvous: FileRendezvous | ServerRendezvous | None, device: str, timeout_s: float
    ) -> None:
        """Join the process group (see Host.join)."""
        self.host.join(rendezvous, device, timeout_s)

    def place(self) -> tuple[str, int]:
        """Return the name of this machine, and the number of this process."""
        return platform.node(), os.getpid()

    def leave(self) -> None:
        """Close the workers, and leave the process group (see Host.leave)."""
        self.host.leave()

    def ping(self) -> None:
        """Do nothing; a process that answers is alive and idle."""

    def call(self, blob: bytes, handles: Sequence = (), *replies: bytes | tuple) -> bytes | tuple:
        """Run one message (see Host.call); return the reply for `unpacked`.

        Ray passes `replies`, references on the controller, as the values behind them.
        """
        inputs = [unpacked(reply) for reply in replies]
        result, stored, failed = self.host.call(blob, handles, inputs)
        return (result, stored, failed) if stored or failed else result
