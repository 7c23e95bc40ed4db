"""The worker's side of an engine's process: starts it with a time limit, and ends it reliably."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.processes.page import doing, moved
from hybridflow.kit.hosting.group import end_group, members

SCRATCH = "HYBRIDFLOW_SCRATCH"
"""A variable of the environment: a folder for temporary files that is removed with the run, also
when a runtime kills the ranks, and Ray what they have started."""
TAIL_LINES = 20
"""Lines of the log's end in messages."""
PROGRESS_S = 10.0
"""Seconds between two calls of `waiting`."""


class EngineDied(HybridFlowError):
    """The process of a rollout engine has ended, or hangs."""


class EngineProcess:
    """One child process with an engine in it.

    A thread sorts its messages into two queues: `answers` to calls, and `events` (completions and
    errors). Both get ("gone", None) when the connection ends. See child.py for the messages.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]):
        """Start the process; its output is appended to `log`."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # Its temporary files go into a folder of its own, which is removed with it.
        folder = os.environ.get(SCRATCH)
        self.scratch = tempfile.mkdtemp(prefix="hybridflow-engine-", dir=folder)

        # A session of its own makes it the leader of a process group, which `end` can kill.
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as out:
            moment = time.strftime("%Y-%m-%d %H:%M:%S")
            out.write(f"--- engine started {moment} by process {os.getpid()}\n".encode())
            out.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hybridflow.kit.hosting.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env={
                    **os.environ,
                    **environment,
                    "PYTHONPATH": import_path(environment.get("PYTHONPATH", "")),
                    "PYTHONUNBUFFERED": "1",
                    "TMPDIR": self.scratch,
                },
            )

        self.connection = Connection(ours.detach())
        self.answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.moved = time.monotonic()
        """When it last showed progress, by time.monotonic."""
        self.ended: str | None = None
        """How the process ended, in words, once that is known."""
        self.killed = False
        """Whether that was by a signal, which was not of this side."""
        self._steps = -1
        self._members: set[int] = set()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="engine-listener")
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process's number, which is its process group's too."""
        return self.process.pid

    def _listen(self) -> None:
        """Put messages into the queues until the connection ends. Runs in a thread of its own."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, value = self.connection.recv()

                # A sign of life without a new step is no progress.
                if kind == "alive" and value == self._steps:
                    continue
                self.moved = time.monotonic()
                moved()
                if kind == "alive":
                    self._steps = value
                elif kind in ("answer", "failed"):
                    self.answers.put((kind, value))
                else:
                    self.events.put((kind, value))

        self.answers.put(("gone", None))
        self.events.put(("gone", None))

    def send(self, name: str, *arguments: Any) -> None:
        """Send a message. Raises EngineDied when the process is gone."""
        if self.ended is not None:
            raise EngineDied(self.ended)
        # As bytes: `Connection.send` leaves a view of a BytesIO in the frames of a BrokenPipeError,
        # and Python 3.12's garbage collector crashes on the two.
        try:
            self.connection.send_bytes(pickle.dumps((name, *arguments)))
        except OSError as error:
            raise self.died() from error

    def ask(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        """Send a message and wait for the answer, as `answer` does."""
        self.send(name, *arguments)
        return self.answer(name, timeout_s)

    def started(self, timeout_s: float, waiting: Callable[[float], None]) -> Any:
        """Wait until the engine has started, as `answer` does; return its first answer."""
        answer = self.answer("start", timeout_s, waiting)
        self._members = members(self.pid)
        return answer

    def answer(
        self, what: str, timeout_s: float, waiting: Callable[[float], None] | None = None
    ) -> Any:
        """Return the answer to the message `what`.

        `waiting` is called every PROGRESS_S with the seconds so far.

        Raises EngineDied when the process ends, fails, or is silent for `timeout_s`, and the
        HybridFlowError with which the engine answered.
        """
        with doing(f"the engine (pid {self.pid}): {what}", timeout_s):
            return self._answer(what, timeout_s, waiting)

    def _answer(self, what: str, timeout_s: float, waiting: Callable[[float], None] | None) -> Any:
        started = time.monotonic()
        while True:
            # Each wait is short, so that `waiting` is called now and then.
            left = timeout_s - (time.monotonic() - started)
            if left <= 0:
                raise self.died(f"gave no answer to {what} within {timeout_s:.0f} s")
            try:
                kind, value = self.answers.get(timeout=min(left, PROGRESS_S))
            except queue.Empty:
                if waiting is not None:
                    waiting(time.monotonic() - started)
                continue

            if kind == "gone":
                raise self.died()
            if kind == "failed":
                raise self.died(f"failed: {value}")
            if isinstance(value, HybridFlowError):
                raise value
            return value

    def died(self, how: str | None = None) -> EngineDied:
        """Kill the process if it still runs; return an error with how it ended, and its log.

        `how` is given if this side gives the process up; otherwise the exit code shows it.
        """
        if self.ended is None:
            if how is None:
                # The exit code may come a moment after the end of the connection.
                _alive(self.process, 5.0)
                code = self.process.poll()
                how = "closed its connection" if code is None else _ending(code)
                self.killed = code is not None and code < 0
            self.end()

            who = f"the process of the rollout engine (pid {self.pid})"
            self.ended = f"{who} {how}; the end of its log {self.log}:\n{self.tail()}"
        return EngineDied(self.ended)

    def tail(self) -> str:
        """Return the last lines of the log, indented."""
        try:
            # So many bytes have TAIL_LINES lines of any usual length.
            lines = self.log.read_bytes()[-20_000:].decode(errors="replace").splitlines()
        except OSError as error:
            return f"  (not readable: {error})"
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])

    def end(self) -> None:
        """Kill the process and whatever it started, and wait for it. Safe to call twice."""
        end_group(self.pid, self._members)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        shutil.rmtree(self.scratch, ignore_errors=True)
        # The listener ends when no process holds the other end of the connection.
        self._listener.join(5.0)
        self.connection.close()


def _alive(process: subprocess.Popen, wait_s: float) -> bool:
    """Return whether a process still runs after `wait_s` seconds."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def _ending(code: int) -> str:
    """Return in words how a process ended by its return code, which is -N after signal N."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (if nobody did, the machine may have run out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def import_path(first: str = "") -> str:
    """Return a child's PYTHONPATH: it can import what this process can, after the paths `first`."""
    # An empty entry of sys.path is this folder.
    paths = [path for path in first.split(os.pathsep) if path]
    paths += [os.path.abspath(path) for path in sys.path if path not in paths]
    return os.pathsep.join(paths)
