"""The process that writes a rank's part of checkpoints, while the rank goes on.

    rank                                        writer, one process for each rank
    ----                                        ------
    a file's parts are copied into a region     (memory that both have)
    "file" ------------------------------------> the region's parts into a safetensors file, their
                                                 checksums, fsync
           <------------------------------------ "free": the region, and what the index is to say
                                                 of its parts, or why they could not be written
    "index" -----------------------------------> the index of the files, fsync
           <------------------------------------ "written", or "failed" with the reason

A rank is held up by the copies alone. Where it ends, in any way, its writer does too: an index that
is not there tells that a checkpoint is not complete. The writer imports no torch.

    python -m hybridflow.kit.checkpoint_writer FD
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from hybridflow.core.processes.look import name_of
from hybridflow.core.processes.page import FOLDER, begin, doing, moved
from hybridflow.core.values.sealed import write_sealed

LENGTH = struct.Struct("<I")
"""Before each message, JSON: its length. With it may come the descriptor of a new region."""
CHUNK = 16 * 2**20
"""Bytes that are written at once."""
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a dtype -> that of safetensors."""


class Held(TypedDict):
    """A part of an entry in a region."""

    entry: str
    start: list[int]
    """First index along each dimension of the entry."""
    shape: list[int]
    dtype: str
    """torch's name."""
    at: int
    """Its first byte in the region."""
    nbytes: int


def key(entry: str, start: Sequence[int]) -> str:
    """Return the name of a part in its file, such as "model.lm_head.weight@0,0"."""
    return f"{entry}@{','.join(map(str, start))}"


def send(connection: socket.socket, message: Mapping[str, Any], region: int | None = None) -> None:
    """Send a message, and the descriptor of a region."""
    content = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(content))], [] if region is None else [region])
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Return a message, and the descriptor that came with it. Raises EOFError at the end."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    head += _exactly(connection, LENGTH.size - len(head))
    message: dict[str, Any] = json.loads(_exactly(connection, *LENGTH.unpack(head)))
    return message, descriptors[0] if descriptors else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        if not (more := connection.recv(count - len(content))):
            raise EOFError
        content += more
    return bytes(content)


def write_file(file: Path, region: memoryview, parts: Sequence[Held]) -> list[str]:
    """Write parts of a region as a safetensors file, onto the disk; return their checksums.

    The format: the length of the header (8 bytes), the header (JSON: name -> dtype, shape, place),
    and the values.
    """
    header = {}
    end = 0
    # The largest elements first, so that each begins at a multiple of its size.
    ordered = sorted(parts, key=lambda part: -_item_bytes(part))
    for part in ordered:
        header[key(part["entry"], part["start"])] = {
            "dtype": DTYPES[part["dtype"]],
            "shape": part["shape"],
            "data_offsets": [end, end + part["nbytes"]],
        }
        end += part["nbytes"]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    sums = {}
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for part in ordered:
            values = region[part["at"] : part["at"] + part["nbytes"]]
            digest = xxhash.xxh3_64()
            for start in range(0, len(values), CHUNK):
                piece = values[start : start + CHUNK]
                digest.update(piece)
                out.write(piece)
                moved()
            sums[part["at"], part["entry"]] = digest.hexdigest()
        out.flush()
        os.fsync(out.fileno())
    return [sums[part["at"], part["entry"]] for part in parts]


def _item_bytes(part: Held) -> int:
    """Return the bytes of one of a part's elements."""
    count = 1
    for size in part["shape"]:
        count *= size
    return part["nbytes"] // max(count, 1)


class Writer:
    """Does what the messages say, one after the other."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.inbox: queue.SimpleQueue[tuple[dict[str, Any], int | None]] = queue.SimpleQueue()
        self.regions: dict[int, memoryview] = {}
        self.written: dict[int, list[dict[str, Any]]] = {}
        """Job -> what its index will say of the parts."""
        self.failed: dict[int, str] = {}

    def read(self) -> None:
        """Put messages into the inbox; end this process with the rank's."""
        try:
            while True:
                self.inbox.put(receive(self.connection))
        except (EOFError, OSError):
            os._exit(0)

    def run(self) -> None:
        """Serve for ever."""
        threading.Thread(target=self.read, daemon=True).start()
        while True:
            message, descriptor = self.inbox.get()
            if descriptor is not None:
                self.regions[message["region"]] = memoryview(mmap.mmap(descriptor, 0))
                os.close(descriptor)
            kind, job = message["kind"], message["job"]
            records: list[dict[str, Any]] | None = None
            with doing(f"the checkpoint {message['folder']}"):
                try:
                    if job not in self.failed:
                        records = getattr(self, f"on_{kind}")(**message)
                except Exception as error:
                    self.failed[job] = f"{type(error).__name__}: {error}"
            if kind == "file":
                free = {"kind": "free", "job": job, "region": message["region"]}
                send(self.connection, {**free, "parts": records, "why": self.failed.get(job)})
            elif job in self.failed:
                send(self.connection, {"kind": "failed", "job": job, "why": self.failed.pop(job)})
            else:
                send(self.connection, {"kind": "written", "job": job})
            if kind == "index":
                self.written.pop(job, None)

    def on_file(
        self, job: int, folder: str, file: str, region: int, parts: list[Held], **_: Any
    ) -> list[dict[str, Any]]:
        """Write a region's parts; return what the index is to say of them."""
        sums = write_file(Path(folder, file), self.regions[region], parts)
        records = [
            {"entry": part["entry"], "start": part["start"], "shape": part["shape"]}
            | {"file": file, "sum": digest}
            for part, digest in zip(parts, sums, strict=True)
        ]
        self.written.setdefault(job, []).extend(records)
        return records

    def on_index(
        self,
        job: int,
        folder: str,
        file: str,
        fields: dict[str, Any],
        parts: Sequence[dict[str, Any]] = (),
        **_: Any,
    ) -> None:
        """Write the index of what a job has written, which completes it.

        parts: what a writer before this one had written of it.
        """
        for part in (*parts, *self.written.get(job, ())):
            fields["entries"][part.pop("entry")]["parts"].append(part)
        write_sealed(Path(folder, file), fields)


def main() -> None:
    """Serve the rank at the other end of the socket whose descriptor is the first argument."""
    folder = os.environ.get(FOLDER)
    # A run that has ended meanwhile has removed it, and nobody would do so again.
    if folder is not None and Path(folder).is_dir():
        begin(folder, f"writer of {name_of(folder, os.getppid())}")
    Writer(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
