"""Looks at the processes of a run on this machine: what each does, and where its threads are.

Nothing here needs the main thread of the process: its page is a file, its state is the system's,
and its stacks are written by another thread, or where that gets no turn by faulthandler (page.py).
A stopped one has no stacks before it goes on, except by py-spy, where that is installed and may
look.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from hybridflow.core.processes.page import (
    HEAD,
    MOST_NOTES,
    NOTE,
    NOTES_AT,
    SIGNAL,
    STATE,
    born,
    page_of,
    said_by_ps,
)

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
    born: str = ""
    """By which another process of the same number is told apart."""
    parent: int = 0
    """The process that has started it; 0: not known."""
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
    def present(self) -> tuple[Note, ...]:
        """The notes within their limits; threads that were given up have others."""
        return tuple(note for note in self.notes if note.left_s > 0)

    @property
    def thread(self) -> Thread | None:
        """The thread of the innermost note, or the main one, which is the last."""
        wanted = self.present[-1].thread if self.present else 0
        found = [thread for thread in self.threads if thread.ident == wanted]
        return next(iter(found or self.threads[-1:]), None)


def looks(folder: Path, stacks: bool = False) -> list[Look]:
    """Return what the processes with a page in a folder do, with their stacks if asked for.

    Of other machines' there is the name alone.
    """
    pages = {page: look_at(page) for page in sorted(folder.glob("*.page"))}
    found = {page: look for page, look in pages.items() if look is not None}
    if stacks:
        # All are asked before the first answer is waited for.
        asked = [page for page, look in found.items() if _answers(look) and _ask(page)]
        deadline = time.monotonic() + ANSWER_S
        for page in asked:
            found[page] = _with_stacks(found[page], page, deadline)
    return list(found.values())


def kill(look: Look) -> None:
    """End a process of this machine, if it is still the one that was looked at."""
    if look.host == here() and state_of(look.pid, look.born) != "gone":
        with suppress(ProcessLookupError, PermissionError):
            os.kill(look.pid, signal.SIGKILL)


def end_stopped(folder: Path) -> None:
    """End the processes with a page in a folder that are stopped."""
    for look in looks(folder):
        if look.state == "stopped":
            kill(look)


def look_at(page: Path) -> Look | None:
    """Return what a page says, and the system of its process; None where it is no page any more."""
    try:
        content, owner = _content(page)
        head = json.loads(content[:HEAD].rstrip(b"\0"))
        moved, count = STATE.unpack_from(content, HEAD)
        look = Look(head["name"], head["pid"], head["host"], "", 0.0)
        look = attrs.evolve(look, born=head["born"], parent=head["parent"])
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    if look.host != here():
        return look
    # What others have put there is not taken for ours.
    if not isinstance(look.pid, int) or _owner(look.pid) not in (None, owner):
        return None

    now = time.monotonic()
    notes = []
    for at in range(min(count, MOST_NOTES)):
        since, until, thread, text = NOTE.unpack_from(content, NOTES_AT + at * NOTE.size)
        left = until if math.isinf(until) else until - now
        words = text.rstrip(b"\0").decode(errors="replace")
        notes.append(Note(words, now - since, left, thread))
    return attrs.evolve(
        look,
        state=state_of(look.pid, look.born),
        still_s=now - moved,
        notes=tuple(notes),
    )


def _content(file: Path) -> tuple[bytes, int]:
    """Return the content of a page or of stacks, and its owner.

    Raises OSError for what is no file of this user's, as a link to one; root may read any.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or os.geteuid() not in (0, status.st_uid):
            raise PermissionError(f"{file} is no file of this user's")
        return opened.read(), status.st_uid


def _owner(pid: int) -> int | None:
    """Return whose a process is; None where that is not known, or it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


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
    else:
        letter = said_by_ps(pid, "state")[:1]
    if its_birth and born(pid) != its_birth:
        letter = ""
    if letter in ("", "Z", "X"):
        return "gone"
    return STATES.get(letter, "")


def _answers(look: Look) -> bool:
    """Return whether a process may say where its threads are."""
    return look.host == here() and look.state not in ("gone", "stopped")


def _ask(page: Path) -> bool:
    """Ask a process for its stacks; return whether that could be done."""
    with suppress(OSError):
        page.with_suffix(".stack").unlink(missing_ok=True)
        ask = page.with_suffix(".ask")
        os.close(os.open(ask, os.O_CREAT | os.O_NOFOLLOW | os.O_WRONLY, 0o600))
        return True
    return False


def _with_stacks(look: Look, page: Path, deadline: float) -> Look:
    """Return the look with the stacks of the process's threads, as far as they can be had."""
    stack = page.with_suffix(".stack")
    while not stack.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        text = _content(stack)[0].decode(errors="replace")
    except OSError:
        with suppress(OSError):
            page.with_suffix(".ask").unlink(missing_ok=True)
        text = _faults(look.pid, page.with_suffix(".fault"))
    return attrs.evolve(look, threads=tuple(_threads(text)))


def _faults(pid: int, file: Path) -> str:
    """Have faulthandler write the stacks of a process whose other threads get no turn."""
    # The signal would end a process that does not handle it.
    if SIGNAL is None or not file.exists() or not _handles(pid):
        return ""
    text = b""
    with suppress(OSError):
        written = len(_content(file)[0])
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, text = text, _content(file)[0][written:]
            if text and text == before:
                break
    return text.decode(errors="replace")


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
