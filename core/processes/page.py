"""The page of a process: what it does, since when, and when it last moved.

Every process of a run keeps files in the run's folder `processes`, which others read (look.py) even
when it hangs or is stopped:

    HOST-PID.page     the name of the process, and the notes of what it is about now
    HOST-PID.ask      made by whoever wants its stacks; a thread of the process looks for it
    HOST-PID.stack    the stacks of its threads, as that thread has written them
    HOST-PID.fault    where faulthandler writes them on SIGNAL, if that thread has no turn: a call
                      of C holds Python's lock then, so that no stack changes meanwhile

    with doing("reward 'slow', row 17"):    a note, until the body ends
        ...
        moved()                             a sign that what is noted goes on

The page is shared memory of a fixed size: a note costs four microseconds, and no disk space
later.
Without `begin`, both do nothing.
"""

from __future__ import annotations

import faulthandler
import json
import math
import mmap
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

FOLDER = "HYBRIDFLOW_PROCESSES"
"""The variable of the environment that has the folder of the pages of a run's processes."""
SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR2", None)
"""The signal on which faulthandler writes the stacks of a process; None: the system has none."""
HEAD = 1024
"""Bytes of a page that hold the process's name, as JSON."""
STATE = struct.Struct("<dq")
"""When it last moved, by time.monotonic, and its number of notes."""
NOTE = struct.Struct("<ddQ168s")
"""Since when, until when at most (inf: no limit), by time.monotonic; the thread; the text."""
NOTES_AT = 1088
"""Where the first note begins."""
SIZE = 4096
"""Bytes of a page."""
MOST_NOTES = (SIZE - NOTES_AT) // NOTE.size
PEERS = "other ranks"
"""The note of a process that waits for others of its group, without blame."""
LOOK_S = 0.5
"""Seconds between two looks for a question."""


@attrs.define(eq=False)
class _Note:
    text: str
    until: float
    since: float = attrs.field(factory=time.monotonic)
    thread: int = attrs.field(factory=threading.get_ident)


class Page:
    """The page of this process."""

    def __init__(self, folder: Path, name: str):
        # Others could have this user's processes signalled by what they put there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.file = page_of(folder, os.getpid())
        self._notes: list[_Note] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._output: Any = None
        try:
            write_page(self.file, os.getpid(), name)
            with self.file.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SIZE)
            # Somebody else's handler is left alone.
            if SIGNAL is not None and signal.getsignal(SIGNAL) == signal.SIG_DFL:
                self._output = self.file.with_suffix(".fault").open("ab")
                faulthandler.register(SIGNAL, self._output, all_threads=True)
        except OSError:
            self.close()  # a page that is never written again would say that nothing moves
            raise
        self.moved()
        threading.Thread(target=self._answer, daemon=True, name="stacks").start()

    def _answer(self) -> None:
        """Write the stacks of all threads when somebody asks. Runs in a thread of its own."""
        ask, stack = (self.file.with_suffix(end) for end in (".ask", ".stack"))
        while not self._over.wait(LOOK_S):
            with suppress(OSError):
                # A program that takes the signal for itself later must not get ours.
                if SIGNAL is not None and signal.getsignal(SIGNAL) != signal.SIG_DFL:
                    self.file.with_suffix(".fault").unlink(missing_ok=True)
                if ask.exists():
                    partial = stack.with_suffix(".partial")
                    partial.write_text(all_stacks())
                    partial.replace(stack)
                    ask.unlink()

    def moved(self) -> None:
        """Note that this process goes on with what it does."""
        struct.pack_into("<d", self._memory, HEAD, time.monotonic())

    def push(self, note: _Note) -> None:
        """Add a note after the others."""
        with self._lock:
            self._notes.append(note)
            self._write(len(self._notes) - 1)

    def pop(self, note: _Note) -> None:
        """Remove a note, which need not be the last one: threads have theirs."""
        with self._lock:
            if note not in self._notes:  # of a page before
                return
            at = self._notes.index(note)
            del self._notes[at]
            self._write(at)

    def _write(self, first: int) -> None:
        """Write the notes from `first` on, and that this process has moved."""
        # Where there are too many, the newest are shown.
        skipped = max(len(self._notes) - MOST_NOTES, 0)
        for at in range(0 if skipped else first, min(len(self._notes), MOST_NOTES)):
            note = self._notes[skipped + at]
            # Cut at a character's end.
            text = note.text.encode(errors="replace")[:168].decode(errors="ignore").encode()
            place = NOTES_AT + at * NOTE.size
            NOTE.pack_into(self._memory, place, note.since, note.until, note.thread, text)
        STATE.pack_into(self._memory, HEAD, time.monotonic(), min(len(self._notes), MOST_NOTES))

    @property
    def moved_at(self) -> float:
        """When this process last moved, by time.monotonic."""
        moved: float = STATE.unpack_from(self._memory, HEAD)[0]
        return moved

    @property
    def notes(self) -> list[_Note]:
        """What this process does, the outermost first."""
        return list(self._notes)

    def close(self) -> None:
        """Remove the files."""
        self._over.set()
        if self._output is not None:
            assert SIGNAL is not None
            faulthandler.unregister(SIGNAL)
            self._output.close()
        for end in (".page", ".ask", ".stack", ".fault"):
            with suppress(OSError):
                self.file.with_suffix(end).unlink(missing_ok=True)


def all_stacks() -> str:
    """Return the stacks of this process's other threads, as faulthandler writes them."""
    main, mine = threading.main_thread().ident, threading.get_ident()
    lines = []
    # The main one is the last, as that which got a signal is.
    for ident, frame in sorted(sys._current_frames().items(), key=lambda one: one[0] == main):
        if ident == mine:
            continue
        lines.append(f"Thread {ident:#x} (most recent call first):")
        for one in reversed(traceback.extract_stack(frame)):
            lines.append(f'  File "{one.filename}", line {one.lineno} in {one.name}')
    return "\n".join(lines) + "\n"


def page_of(folder: Path, pid: int) -> Path:
    """Return the page of a process of this machine."""
    return folder / f"{platform.node()}-{pid}.page"


def write_page(file: Path, pid: int, name: str) -> None:
    """Write a page without notes; also for a process that keeps none itself."""
    fields = {"name": name, "pid": pid, "host": platform.node(), "born": born(pid)}
    head = json.dumps({**fields, "parent": os.getppid() if pid == os.getpid() else 0})
    content = bytearray(SIZE)
    # ASCII, so that a cut leaves no half character; names are far shorter.
    content[: len(head)] = head.encode("ascii")[:HEAD]
    STATE.pack_into(content, HEAD, time.monotonic(), 0)
    file.write_bytes(content)


def born(pid: int) -> str:
    """Return a mark by which another process of the same number is told apart; "": unknown."""
    try:
        # The name in parentheses may have spaces itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "" if Path("/proc/self/stat").exists() else said_by_ps(pid, "lstart")


def said_by_ps(pid: int, field: str) -> str:
    """Return what the system's `ps` says of a process, where there is no /proc (macOS)."""
    said = subprocess.run(["ps", "-o", f"{field}=", "-p", str(pid)], capture_output=True, text=True)
    return said.stdout.strip()


_page: Page | None = None


def begin(folder: str | Path | None, name: str, again: bool = False) -> None:
    """Begin the page of this process, in a run's folder of pages; without one do nothing.

    A page that it has is kept, or with `again` replaced. A folder that cannot be written leaves the
    process without: what is not seen is not worth a run.
    """
    global _page
    if not folder or (_page is not None and not again):
        return
    end()
    with suppress(OSError):
        _page = Page(Path(folder), name)


def end() -> None:
    """Remove this process's page, if it has one."""
    global _page
    page, _page = _page, None
    if page is not None:
        page.close()


def environment() -> dict[str, str]:
    """Return the variables by which processes of the same run find the folder of its pages."""
    return {} if _page is None else {FOLDER: str(_page.folder)}


def own() -> Page | None:
    """Return this process's page."""
    return _page


@contextmanager
def doing(text: str, limit_s: float = math.inf) -> Iterator[None]:
    """Note on the page what the body does. limit_s: seconds after which it gives up by itself."""
    page = _page
    if page is None:
        yield
        return
    note = _Note(text, time.monotonic() + limit_s)
    page.push(note)
    try:
        yield
    finally:
        page.pop(note)


def moved() -> None:
    """Note that what this process does goes on: a token, a micro-batch, a row, a file."""
    if _page is not None:
        _page.moved()


def _forget() -> None:
    """Leave the page to the process that this one was forked from."""
    global _page
    _page = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
