"""The worker's side of an engine's process: started with a deadline, listened to, and ended for certain."""

from __future__ import annotations

import contextlib
import os
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
from hybridflow.kit.hosting.group import end_group, members

TAIL_LINES = 20
PROGRESS_S = 10.0


class EngineDied(HybridFlowError):
    """The process of a rollout engine is gone, or hangs."""


class EngineProcess:
    """One child process with an engine in it. What it says comes in two queues: answers to calls, and completions."""

    def __init__(self, log: Path, environment: Mapping[str, str], pass_fds: tuple[int, ...] = ()):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = tempfile.mkdtemp(prefix="hybridflow-engine-")
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as out:
            out.write(
                f"--- engine started {time.strftime('%Y-%m-%d %H:%M:%S')} by process {os.getpid()}\n".encode()
            )
            out.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hybridflow.kit.hosting.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                pass_fds=(theirs.fileno(), *pass_fds),
                env={
                    **os.environ, **environment, "PYTHONPATH": os.pathsep.join(_paths(environment)),
                    "PYTHONUNBUFFERED": "1", "TMPDIR": self.scratch,
                },
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        self.answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.moved = time.monotonic()
        """When it last showed progress."""
        self.ended: str | None = None
        """How it ended, once that is known."""
        self._steps = -1
        self._members: set[int] = set()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="engine-listener")
        self._listener.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, value = self.connection.recv()
                if kind == "alive" and value == self._steps:
                    continue
                self.moved = time.monotonic()
                if kind == "alive":
                    self._steps = value
                else:
                    (self.answers if kind in ("answer", "failed") else self.events).put(
                        (kind, value)
                    )
        self.answers.put(("gone", None))
        self.events.put(("gone", None))

    def send(self, name: str, *arguments: Any) -> None:
        """Raises EngineDied."""
        if self.ended is not None:
            raise EngineDied(self.ended)
        try:
            self.connection.send((name, *arguments))
        except OSError as error:
            raise self.died() from error

    def ask(self, name: str, *arguments: Any, timeout_s: float) -> Any:
        """Send, and wait for the answer. Raises EngineDied, or the HybridFlowError of the engine."""
        self.send(name, *arguments)
        return self.answer(name, timeout_s)

    def started(self, timeout_s: float, waiting: Callable[[float], None]) -> None:
        """Wait until the engine has started."""
        self.answer("start", timeout_s, waiting)
        self._members = members(self.pid)

    def answer(
        self, what: str, timeout_s: float, waiting: Callable[[float], None] | None = None
    ) -> Any:
        """`waiting` is called with the seconds so far now and then."""
        started = time.monotonic()
        while True:
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
        """End what is left of it, and say how it ended, with the tail of its log."""
        if self.ended is None:
            if how is None:
                _alive(self.process, 5.0)
                code = self.process.poll()
                how = "closed its connection" if code is None else _ending(code)
            self.end()
            who = f"the process of the rollout engine (pid {self.pid})"
            self.ended = f"{who} {how}; the end of its log {self.log}:\n{self.tail()}"
        return EngineDied(self.ended)

    def tail(self) -> str:
        try:
            lines = self.log.read_bytes()[-20_000:].decode(errors="replace").splitlines()
        except OSError as error:
            return f"  (not readable: {error})"
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])

    def end(self) -> None:
        """Kill it and whatever it has started; wait until it is gone. Safe to call twice."""
        end_group(self.pid, self._members)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._listener.join(5.0)
        self.connection.close()


def _alive(process: subprocess.Popen, wait_s: float) -> bool:
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (if nobody did, the machine may have run out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _paths(environment: Mapping[str, str]) -> list[str]:
    """What this process can import, the child can."""
    first = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    return first + [os.path.abspath(p) for p in sys.path if p not in first]
