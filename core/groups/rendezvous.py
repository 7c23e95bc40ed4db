"""How the ranks of a pool meet: the store by which torch.distributed makes process groups.

torch's own server lets everybody read and write, who reaches it. So ranks on one machine meet at a
file, in a folder that belongs to their user alone, and ranks on several machines at a server of
rank 0 that lets in those who prove (by HMAC) that they have the pool's key:

    StoreServer (rank 0) <-- handshake, then requests and answers -- StoreClient (each rank)

What they say is not encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

import attrs
import torch.distributed as dist

HANDSHAKE_S = 30
"""Seconds that who connects may take to prove that it has the key."""
CONNECT_S = 60.0
"""Seconds for which a rank tries to reach the server."""


@attrs.frozen
class FileRendezvous:
    """A meeting of ranks on one machine."""

    path: str
    """A file that is not there yet, in a folder that others may not enter."""

    def store(self, world: int, timeout_s: float) -> dist.Store:
        """Return the store; timeout_s: how long a rank waits for a key."""
        store = dist.FileStore(self.path, world)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store


@attrs.frozen
class ServerRendezvous:
    """A meeting of ranks on several machines, at a StoreServer."""

    host: str
    port: int
    key: bytes = attrs.field(repr=False)

    def store(self, world: int, timeout_s: float) -> dist.Store:
        """Return a client of the server; timeout_s: how long a rank waits for a key.

        Raises torch.distributed.DistStoreError where the server is not reached.
        """
        return StoreClient(self, timeout_s)


class StoreServer:
    """The keys and values of a pool, for those who have its key; threads serve until close()."""

    def __init__(self, host: str, key: bytes):
        """host: this machine's address, at which alone it listens, on a port that is free."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._key = key
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.rendezvous = ServerRendezvous(host, self._listener.getsockname()[1], key)
        threading.Thread(target=self._accept, daemon=True, name="hybridflow-store").start()

    def close(self) -> None:
        """Let nobody in any more."""
        # Closing alone does not wake the thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._listener.accept()
                # A stranger that says nothing keeps nobody else waiting.
                serving = threading.Thread(target=self._serve, args=(link,), daemon=True)
                serving.start()

    def _serve(self, link: socket.socket) -> None:
        """Answer one rank's requests until it closes the connection."""
        _limit_waiting(link, HANDSHAKE_S)
        with (
            contextlib.suppress(OSError, EOFError, AuthenticationError),
            Connection(os.dup(link.fileno())) as connection,
        ):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _limit_waiting(link, 0)
            while True:
                operation, keys, number, values = _unpack(connection.recv_bytes())
                answer = self._answer(operation, keys, number, values)
                connection.send_bytes(_pack("", [], *answer))
        link.close()

    def _answer(
        self, operation: str, keys: list[str], number: float, values: list[bytes]
    ) -> tuple[float, list[bytes]]:
        """Carry out one operation of torch.distributed.Store; return a number and values."""
        with self._changed:
            if operation == "wait":  # number: for how many seconds
                there = self._changed.wait_for(lambda: self._has(keys), number)
                return float(there), [self._values[key] for key in keys] if there else []
            if operation == "check":
                return float(self._has(keys)), []
            if operation == "count":
                return float(len(self._values)), []

            [key] = keys
            if operation == "delete":
                return float(self._values.pop(key, None) is not None), []
            if operation == "add":
                number += int(self._values.get(key, b"0"))
                values = [b"%d" % number]
            if operation == "compare":
                expected, desired = values
                now = self._values.get(key, b"")
                values = [desired if now == expected else now or expected]
                if now != expected:
                    return 0.0, values
            self._values[key] = values[0]
            self._changed.notify_all()
            return number, values

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


class StoreClient(dist.Store):
    """A rank's connection to a StoreServer; its methods are those of torch.distributed.Store."""

    def __init__(self, at: ServerRendezvous, timeout_s: float):
        super().__init__()
        self._clones: list[StoreClient] = []  # torch keeps no reference to Python's part of them
        self._at = at
        self._lock = threading.Lock()
        self.set_timeout(timedelta(seconds=timeout_s))
        ends = time.monotonic() + CONNECT_S
        while True:
            try:
                self._connection = Client((at.host, at.port), authkey=at.key)
                return
            except (OSError, EOFError) as error:
                if time.monotonic() > ends:
                    raise dist.DistStoreError(
                        f"the pool's first rank is not reached at {at.host}:{at.port}: {error}"
                    ) from error
                time.sleep(0.2)
            except AuthenticationError as error:
                raise dist.DistStoreError(
                    f"{at.host}:{at.port} is not the pool's first rank: {error}"
                ) from error

    def _ask(
        self, operation: str, keys: Sequence[str], number: float = 0, values: Sequence[bytes] = ()
    ) -> tuple[float, list[bytes]]:
        """Have the server carry out an operation; return its answer."""
        try:
            with self._lock:
                self._connection.send_bytes(_pack(operation, keys, number, values))
                _, _, number, answer = _unpack(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise dist.DistStoreError(
                f"the pool's first rank does not answer any more: {error!r}"
            ) from error
        return number, answer

    def _waited(self, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        limit = self._limit() if timeout is None else timeout
        there, values = self._ask("wait", keys, limit.total_seconds())
        if not there:
            raise dist.DistStoreError(
                f"no rank has set {', '.join(keys)} within {limit.total_seconds():g} s"
            )
        return values

    def _limit(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined]

    # torch names the methods that it calls differently from those that it offers.

    def clone(self) -> StoreClient:
        self._clones.append(StoreClient(self._at, self._limit().total_seconds()))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], values=[_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._waited([key], None)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._waited(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare", [key], values=[_bytes(expected), _bytes(desired)])[1][0]

    def deleteKey(self, key: str) -> bool:
        return bool(self._ask("delete", [key])[0])

    delete_key = deleteKey

    def getNumKeys(self) -> int:
        return int(self._ask("count", [])[0])

    num_keys = getNumKeys

    def has_extended_api(self) -> bool:
        return False


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _pack(operation: str, keys: Sequence[str], number: float, values: Sequence[bytes]) -> bytes:
    """Return a request or an answer: the length of its head, the head in JSON, and the values."""
    head = json.dumps([operation, list(keys), number, [len(value) for value in values]]).encode()
    return struct.pack("!I", len(head)) + head + b"".join(values)


def _unpack(message: bytes) -> tuple[str, list[str], Any, list[bytes]]:
    """Return the inverse of `_pack`."""
    (length,) = struct.unpack_from("!I", message)
    operation, keys, number, sizes = json.loads(message[4 : 4 + length])
    values = []
    at = 4 + length
    for size in sizes:
        values.append(message[at : at + size])
        at += size
    return operation, keys, number, values


def _limit_waiting(link: socket.socket, seconds: int) -> None:
    """Let a read fail that waits longer; 0: never."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
