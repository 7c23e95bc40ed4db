"""Looks at the processes of a run on this machine: what each does, and where its threads are.

Nothing here needs an answer of the process: its page is a file, its state is the system's, and its
stacks are written by faulthandler, also while it is in a call of C. A stopped one has no stacks
before it goes on, except by py-spy, where that is installed and may look.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from hybridflow.core.processes.page import HEAD, NOTE, NOTES_AT, SIGNAL, SIZE, STATE, born, page_of

ANSWER_S = 2.0
"""Seconds that a process may take to write its stacks."""
STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "in the system (a disk, say)"}
"""The system's letters of states that are told."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(Current t|T)hread 0x([0-9a-f]+)")


@attrs.frozen
class Frame:
    """A place in a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def short(self) -> str:
        """The same, with the end of the path alone."""
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@attrs.frozen
class Thread:
    """The stack of a thread."""

    ident: int
    frames: tuple[Frame, ...]
    """The innermost first."""


@attrs.frozen
class Note:
    """What a process is about."""

    text: str
    seconds: float
    """Since when."""
    left_s: float
    """Seconds until it gives up by itself; inf: never."""
    thread: int


@attrs.frozen
class Look:
    """A process, as it was seen."""

    name: str
    pid: int
    host: str
    state: str
    """"gone", one of STATES, or "": it runs, or waits."""
    still_s: float
    """Seconds since it last moved."""
    notes: tuple[Note, ...] = ()
    """The outermost first."""
    threads: tuple[Thread, ...] = ()
    """Those of its stacks that were asked for."""

    @property
    def place(self) -> tuple[str, int]:
        """The machine's name, and the process's number there."""
        return self.host, self.pid

    @property
    def where(self) -> str:
        """The process's name, and its number."""
        return f"{self.name} (pid {self.pid} on {self.host})"

    @property
    def thread(self) -> Thread | None:
        """The thread of the innermost note, or the main one."""
        wanted = self.notes[-1].thread if self.notes else 0
        found = [thread for thread in self.threads if thread.ident == wanted]
        # faulthandler names the thread that got the signal last: the main one, as a rule.
        return next(iter(found or self.threads[-1:]), None)


def looks(folder: Path, stacks: bool = False) -> list[Look]:
    """Return what the processes with a page in a folder do, with their stacks if asked for.

    Of other machines' there is the name alone.
    """
    found = []
    for page in sorted(folder.glob("*.page")):
        if (look := look_at(page)) is not None:
            found.append(with_stacks(look, page) if stacks else look)
    return found


def kill(place: tuple[str, int]) -> None:
    """End a process of this machine, by its name and the process's number."""
    host, pid = place
    if host == here():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def look_at(page: Path) -> Look | None:
    """Return what a page says, and the system of its process; None where it is no page any more."""
    try:
        content = page.read_bytes()
        head = json.loads(content[:HEAD].rstrip(b"\0"))
        moved, count = STATE.unpack_from(content, HEAD)
        look = Look(head["name"], head["pid"], head["host"], "", 0.0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if look.host != here() or len(content) != SIZE:
        return look

    now = time.monotonic()
    notes = []
    for at in range(count):
        since, until, thread, text = NOTE.unpack_from(content, NOTES_AT + at * NOTE.size)
        left = until if math.isinf(until) else until - now
        words = text.rstrip(b"\0").decode(errors="replace")
        notes.append(Note(words, now - since, left, thread))
    return attrs.evolve(
        look,
        state=state_of(look.pid, head["born"]),
        still_s=now - moved,
        notes=tuple(notes),
    )


def name_of(folder: str | None, pid: int) -> str:
    """Return the name of a process of this machine by its page."""
    look = look_at(page_of(Path(folder), pid)) if folder else None
    return f"process {pid}" if look is None else look.name


def here() -> str:
    """Return the name of this machine."""
    return platform.node()


def state_of(pid: int, its_birth: str = "") -> str:
    """Return the state of a process, as `Look.state`.

    its_birth: `born` of the process that is meant.
    """
    letter = ""
    if Path("/proc/self/stat").exists():
        with suppress(OSError):
            letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if its_birth and born(pid) != its_birth:
            letter = ""
    else:
        said = subprocess.run(
            ["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True
        )
        letter = said.stdout.strip()[:1]
    if letter in ("", "Z", "X"):
        return "gone"
    return STATES.get(letter, "")


def with_stacks(look: Look, page: Path) -> Look:
    """Return the look with the stacks of the process's threads, as far as they can be had."""
    if look.state == "gone" or look.host != here():
        return look
    text = "" if look.state else _asked(look.pid, page.with_suffix(".stack"))
    return attrs.evolve(look, threads=tuple(_threads(text)))


def _asked(pid: int, file: Path) -> str:
    """Have a process write its stacks; return them, or "" where it does not."""
    # The signal would end a process that does not handle it.
    if SIGNAL is None or not file.exists() or not _handles(pid):
        return ""
    text = ""
    with suppress(OSError):
        os.truncate(file, 0)
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, text = text, file.read_text(errors="replace")
            if text and text == before:
                break
    return text


def _handles(pid: int) -> bool:
    """Return whether a process has a handler of SIGNAL; where that is not known, that it has."""
    assert SIGNAL is not None
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def _threads(text: str) -> Iterator[Thread]:
    """Yield the threads of what faulthandler has written."""
    ident: int | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            if ident is not None:
                yield Thread(ident, tuple(frames))
            ident, frames = int(begins[2], 16), []
        elif found := _FRAME.match(line):
            frames.append(Frame(found[1], int(found[2]), found[3]))
    if ident is not None:
        yield Thread(ident, tuple(frames))


def descendants(pid: int) -> list[tuple[int, str]]:
    """Return (number, command) of the processes that a process has started, and theirs (Linux)."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = []
    below = sorted(children.get(pid, ()))
    while below:
        child = below.pop(0)
        with suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found.append((child, b" ".join(words).decode(errors="replace").strip()))
        below += sorted(children.get(child, ()))
    return found


def spied(pid: int) -> str:
    """Return the stacks of a process by py-spy; "" where it is not there, or may not look."""
    program = shutil.which("py-spy")
    if program is None or pid == os.getpid():
        return ""
    # It would stop the process, and a stopped one never goes on then.
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=10.0,
        )
        if said.returncode == 0:
            return said.stdout
    return ""


def can_spy() -> bool:
    """Return whether py-spy is installed."""
    return shutil.which("py-spy") is not None
