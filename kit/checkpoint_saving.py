"""A rank's side of writing a checkpoint: copies into memory that its writer has too.

kit/checkpoint_writer.py has the other side, and the messages.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.errors import CheckpointError
from hybridflow.core.processes.page import doing, moved
from hybridflow.core.workers.device_memory import host_memory
from hybridflow.kit.checkpoint_files import FORMAT, StatePart, index_file
from hybridflow.kit.checkpoint_writer import Held, receive, send
from hybridflow.kit.hosting.process import import_path

log = logging.getLogger(__name__)

FILE_BYTES = 10**9
"""The most bytes of a file, unless a single part has more."""
MOST_ENDS = 3
"""Writers that may end while a checkpoint is written; then it has failed."""
ALIGNED = 64
"""Each part begins at a multiple of so many bytes in its region."""
SPARE = 0.1
"""Share of the host's memory that is left free; where a copy of the whole state would take it, a
rank waits for its writer between one file and the next."""


@attrs.define(eq=False)
class Region:
    """Memory that a rank and its writer share."""

    number: int
    descriptor: int
    values: torch.Tensor
    """Its bytes, uint8."""
    known: bool = False
    """Whether the writer has it."""


class Writing:
    """Part of a checkpoint that is being written beside (a core.contracts.training.Writing)."""

    def __init__(self, writer: RankWriter, job: int):
        self._writer = writer
        self._job = job

    def done(self, wait: bool) -> bool:
        """Return whether all is on the disk, or wait until it is. Raises CheckpointError."""
        return self._writer.done(self._job, wait)


@attrs.define(eq=False)
class _Job:
    """A checkpoint's part that is not on the disk yet."""

    number: int
    files: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    """Region -> the message that has it written; those that are not written yet."""
    records: list[dict[str, Any]] = attrs.field(factory=list)
    """What the index says of the parts that are written."""
    earlier: list[dict[str, Any]] = attrs.field(factory=list)
    """Those of them that a writer before the present one has written."""
    index: dict[str, Any] | None = None
    """The message that completes it, once all files are sent."""
    why: str | None = None
    """Why a file could not be written."""
    ends: int = 0
    """How often its writer has ended."""


class RankWriter:
    """The writer process of this rank, and the regions that both have.

    Where the process has ended, another one takes its place, and writes what was not written: the
    regions are this process's too.
    """

    def __init__(self) -> None:
        self._free: list[Region] = []
        self._used: dict[int, Region] = {}
        self._numbers = count()
        self._jobs: dict[int, _Job] = {}
        self._failed: dict[int, str] = {}
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "hybridflow.kit.checkpoint_writer"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is for the rank
                env={**os.environ, "PYTHONPATH": import_path()},
            )
        self.connection = ours

    def write(
        self, parts: Sequence[StatePart], folder: Path, rank: int, world: int, version: int
    ) -> Writing:
        """Copy the parts, and have them written into files of this rank; return before they are.

        The parts may change from then on.
        """
        job = _Job(next(self._numbers))
        self._jobs[job.number] = job
        entries: dict[str, dict[str, Any]] = {}
        for part in parts:
            dtype = str(part.values.dtype).removeprefix("torch.")
            entry = {"shape": list(part.shape), "dtype": dtype, "parts": []}
            entries.setdefault(part.entry, entry)

        about = {"job": job.number, "folder": str(folder.absolute())}
        for number, group in enumerate(_by_file(parts)):
            held, nbytes = _places(group)
            region = self._region(nbytes)
            _copy(group, held, region.values)
            moved()
            file = f"rank-{rank:05d}-{number}.safetensors"
            self._used[region.number] = region
            job.files[region.number] = {"kind": "file", **about, "file": file, "parts": held}
            self._send(job, region)
        fields = {"format": FORMAT, "version": version, "entries": entries}
        job.index = {"kind": "index", **about, "file": index_file(rank, world), "fields": fields}
        self._send(job)
        return Writing(self, job.number)

    def done(self, job: int, wait: bool) -> bool:
        """Return whether a job is done, or wait for it. Raises CheckpointError where it failed."""
        self._hear(0.0)
        while wait and job in self._jobs:
            with doing(f"the writer of checkpoints (pid {self.process.pid})"):
                self._hear(None)
        if job in self._failed:
            raise CheckpointError(self._failed.pop(job))
        return job not in self._jobs

    def _region(self, nbytes: int) -> Region:
        """Return a free region of at least so many bytes; wait for one where memory is short."""
        while True:
            self._hear(0.0)
            large = [region for region in self._free if region.values.numel() >= nbytes]
            if large:
                region = min(large, key=lambda region: region.values.numel())
                self._free.remove(region)
                return region
            if not self._used or _fits(nbytes):
                return _allocate(nbytes, len(self._free) + len(self._used))
            with doing(f"the writer of checkpoints (pid {self.process.pid}): memory"):
                self._hear(None)

    def _send(self, job: _Job, region: Region | None = None) -> None:
        """Send the message of a region, or a job's index."""
        try:
            self._send_now(job, region)
        except OSError:
            self._replace()  # it gets all messages, this one too

    def _send_now(self, job: _Job, region: Region | None) -> None:
        if region is None:
            assert job.index is not None
            send(self.connection, {**job.index, "parts": job.earlier})
            return
        message = {**job.files[region.number], "region": region.number}
        send(self.connection, message, None if region.known else region.descriptor)
        region.known = True

    def _hear(self, wait_s: float | None) -> None:
        """Take the writer's answers; without any, wait so long for the first (None: for ever)."""
        while self.connection.fileno() >= 0 and select.select([self.connection], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                message, _ = receive(self.connection)
            except (EOFError, OSError):
                self._replace()
                continue
            # A job whose writers have all ended is answered no more.
            job = self._jobs.get(message["job"])
            if message["kind"] == "free":
                self._free.append(self._used.pop(message["region"]))
                if job is not None:
                    del job.files[message["region"]]
                    job.records += message["parts"] or []
                    job.why = message["why"]
                continue
            self._jobs.pop(message["job"], None)
            if message["kind"] == "failed":
                self._failed[message["job"]] = message["why"]

    def _give_up(self, why: str) -> None:
        """Fail what is not written; the next checkpoint tries again to start a writer."""
        global _writer
        _writer = None
        self._failed.update(dict.fromkeys(self._jobs, why))
        self._jobs.clear()

    def _replace(self) -> None:
        """Start another writer in the place of one that has ended, for what is not written."""
        self.connection.close()
        code = self.process.wait()
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        ended = f"the process that writes checkpoints (pid {self.process.pid}) has ended {how}"
        for job in list(self._jobs.values()):
            job.earlier = list(job.records)
            job.ends += 1
            if job.ends == MOST_ENDS and job.why is None:
                job.why = f"{ended}, as {MOST_ENDS - 1} others before it"
            if job.why is not None:
                del self._jobs[job.number]
                self._failed[job.number] = job.why
        log.warning("%s; another one writes what it has not", ended)
        try:
            self._start()
        except OSError as error:
            self._give_up(f"{ended}, and no other one can be started: {error}")
            return
        for region in (*self._free, *self._used.values()):
            region.known = False
        wanted = {number for job in self._jobs.values() for number in job.files}
        for number in self._used.keys() - wanted:
            self._free.append(self._used.pop(number))
        try:
            for job in self._jobs.values():
                for number in job.files:
                    self._send_now(job, self._used[number])
                if job.index is not None:
                    self._send_now(job, None)
        except OSError:
            self._replace()


_writer: RankWriter | None = None


def rank_writer() -> RankWriter:
    """Return the writer of this process, which is started with its first checkpoint."""
    global _writer
    if _writer is None:
        _writer = RankWriter()
    return _writer


def _forget() -> None:
    global _writer
    _writer = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _by_file(parts: Iterable[StatePart]) -> Iterator[list[StatePart]]:
    """Yield the parts of one file after the other."""
    group: list[StatePart] = []
    nbytes = 0
    for part in parts:
        if group and nbytes + part.values.nbytes > FILE_BYTES:
            yield group
            group = []
            nbytes = 0
        group.append(part)
        nbytes += part.values.nbytes
    if group:
        yield group


def _places(group: Sequence[StatePart]) -> tuple[list[Held], int]:
    """Return where each part of a file is in its region, and the region's size."""
    held: list[Held] = []
    end = 0
    for part in group:
        held.append(
            Held(
                entry=part.entry,
                start=list(part.box.start),
                shape=list(part.box.shape),
                dtype=str(part.values.dtype).removeprefix("torch."),
                at=end,
                nbytes=part.values.nbytes,
            )
        )
        end += -(-part.values.nbytes // ALIGNED) * ALIGNED
    return held, end


def _copy(group: Sequence[StatePart], held: Sequence[Held], region: torch.Tensor) -> None:
    """Copy the values of parts into a region."""
    devices = set()
    for part, place in zip(group, held, strict=True):
        values = part.values.detach()
        mine = region[place["at"] : place["at"] + place["nbytes"]]
        mine.view(values.dtype).view(values.shape).copy_(values, non_blocking=True)
        devices.add(values.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _fits(nbytes: int) -> bool:
    """Return whether the host has so much memory to spare."""
    memory = host_memory()
    return memory is None or memory[1] - nbytes > SPARE * memory[0]


def _allocate(nbytes: int, number: int) -> Region:
    """Make a region. Raises CheckpointError where there is no memory for it."""
    # Neither leaves anything behind, however the two processes end.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hybridflow-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    size = max(nbytes, 1)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # now, rather than when it is written
        else:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise CheckpointError(f"no memory for a copy of {nbytes / 1e9:.3g} GB: {error}") from error
    values = torch.frombuffer(memory, dtype=torch.uint8)
    # Copies from a GPU are several times faster into memory that is registered.
    if torch.cuda.is_initialized():
        torch.cuda.cudart().cudaHostRegister(values.data_ptr(), size, 0)
    return Region(number, descriptor, values)
