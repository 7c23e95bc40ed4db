"""The Ray actor that hosts one rank. It sets the environment before torch is imported, so threads are counted right."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import ray


class RayStore:
    """Blocks as objects of Ray's store; read without a copy, so whoever hands out tensors copies (core/groups/wire.py)."""

    def put(self, block: list) -> Any:
        return ray.put(block)

    def get(self, handle: Any) -> list:
        return ray.get(handle)


def unpacked(reply: bytes | tuple) -> tuple[bytes, Sequence[Any], bool]:
    """(blob, handles, failed): most replies are a blob alone, since Ray sends bytes without pickling them."""
    return (reply, (), False) if isinstance(reply, bytes) else reply


@ray.remote(max_restarts=0, max_task_retries=0)
class HostActor:
    def __init__(
        self, pool: str, rank: int, world: int, environment: dict[str, str], path: list[str]
    ):
        os.environ.update(environment)
        sys.path.extend(p for p in path if p not in sys.path)
        from hybridflow.core.groups.host import Host
        from hybridflow.kit.memory import keep_freed_memory

        keep_freed_memory()
        self.host = Host(pool, rank, world, RayStore())

    def address(self) -> str:
        return self.host.address()

    def join(self, address: str, device: str, timeout_s: float) -> None:
        self.host.join(address, device, timeout_s)

    def ping(self) -> None:
        """Answered by a process that is alive and idle."""

    def call(self, blob: bytes, handles: Sequence = (), *replies: bytes | tuple) -> bytes | tuple:
        blob, handles, failed = self.host.call(blob, handles, [unpacked(r) for r in replies])
        return (blob, handles, failed) if handles or failed else blob
