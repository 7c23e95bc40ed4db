"""math-verify in a process of its own, so that a comparison that does not end can be ended.

math-verify's own time limits are signals: they work in the main thread only, and not inside one long multiplication.
Run as a module, this file is that process: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from hybridflow.core.errors import RewardError
from hybridflow.core.values.text import shorten

START_S = 120.0
"""Seconds for the process to start and import sympy."""
MEMORY_BYTES = 4 * 2**30
"""Address space of the process: a number with billions of digits fails instead of filling the machine."""

log = logging.getLogger(__name__)


class Verifier:
    """Compares answers in a child process, started at the first call. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None
        self._buffer = b""
        self.timeouts = 0

    def equal(self, gold: str, response: str, timeout_s: float) -> bool:
        """Whether the response's final answer equals `gold`. False when that takes longer than `timeout_s`.

        Raises RewardError when `gold` is nothing that math-verify can read.
        """
        with self._lock:
            process = self._running()
            try:
                process.stdin.write(json.dumps([gold, response]).encode() + b"\n")
                process.stdin.flush()
                reply = self._read(process, timeout_s)
            except (BrokenPipeError, EOFError):
                code = process.wait()
                self._stop()
                log.warning(
                    "math-verify ended (code %d) at response %s; it counts as wrong",
                    code,
                    shorten(response),
                )
                return False
            if reply is None:
                self._stop()
                self.timeouts += 1
                log.warning(
                    "math-verify took %g s at response %s; it counts as wrong",
                    timeout_s,
                    shorten(response),
                )
                return False
        if isinstance(reply, str):
            raise RewardError(
                f"the expected answer {shorten(gold)} is nothing that math-verify can read: {reply}"
            )
        return reply

    def _running(self) -> Any:
        if self._process is None:
            path = os.pathsep.join(p for p in sys.path if p)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            weakref.finalize(self, _end, process)
            self._process, self._buffer = process, b""
            try:
                ready = self._read(process, START_S)
            except EOFError:
                ready = None
            if ready is not True:
                self._stop()
                raise RewardError(
                    f"the process of math-verify did not start (exit code {process.returncode}); its message is on "
                    f"stderr. Try: {sys.executable} -c 'import math_verify'"
                )
        return self._process

    def _read(self, process: Any, timeout_s: float) -> Any:
        """The next reply, or None after `timeout_s`. Raises EOFError when the process is gone."""
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                part = os.read(process.stdout.fileno(), 65536)
                if not part:
                    raise EOFError
                self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None


def _end(process: Any) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


def _serve() -> None:
    """The child: reads [gold, response], answers true, false, or a text that says what is wrong with gold."""
    logging.disable()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    import math_verify

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)

    print("true", file=out, flush=True)
    for line in sys.stdin:
        gold, response = json.loads(line)
        marked = "$" in gold or "\\boxed" in gold
        expected = parse(gold) if marked else parse(f"\\boxed{{{gold}}}") or parse(gold)
        if expected:
            got = parse(response) or (
                parse(f"\\boxed{{{response}}}") if len(response) < 200 else []
            )
            reply: Any = bool(got) and bool(math_verify.verify(expected, got, timeout_seconds=None))
        else:
            reply = "no expression found"
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    _serve()
