"""Runs math-verify in a process of its own, so that a comparison that never ends can be stopped.

math-verify's own time limits are signals, which work only in the main thread, and not within one
long multiplication. Run as a module, this file is that process:

    Verifier  -- one JSON line: [gold, response] ------------------------> _serve
              <- one JSON line: true, false, or a text about a bad gold --
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
"""Address space of the process: a number with billions of digits fails rather than fill the
machine."""

log = logging.getLogger(__name__)


class Verifier:
    """Compares answers in a child process, which the first call starts.

    It may be used from several threads; comparisons run one at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None
        self._buffer = b""
        """The bytes read from the process after its last complete line."""
        self.timeouts = 0
        """Number of comparisons that took too long."""

    def equal(self, gold: str, response: str, timeout_s: float) -> bool:
        """Return whether the response's final answer equals `gold`.

        False where that takes longer than `timeout_s`, and where the process dies of it. Raises
        RewardError when math-verify cannot parse `gold`.
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
        """Return the process, started if there is none; raises RewardError if that fails."""
        if self._process is not None:
            return self._process

        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        weakref.finalize(self, _end, process)
        self._process = process
        self._buffer = b""

        # Its first line says that math-verify is imported.
        try:
            ready = self._read(process, START_S)
        except EOFError:
            ready = None
        if ready is not True:
            self._stop()
            raise RewardError(
                "the process of math-verify did not start (exit code "
                f"{process.returncode}); its message is on stderr. "
                f"Try: {sys.executable} -c 'import math_verify'"
            )
        return self._process

    def _read(self, process: Any, timeout_s: float) -> Any:
        """Return the next reply, or None after `timeout_s`.

        Raises EOFError when the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                piece = os.read(process.stdout.fileno(), 65536)
                if not piece:
                    raise EOFError
                self._buffer += piece

        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _stop(self) -> None:
        """End the process; the next comparison starts another."""
        if self._process is not None:
            _end(self._process)
            self._process = None


def _end(process: Any) -> None:
    """Kill a process, wait for its end and close its pipes."""
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


def _serve() -> None:
    """Answer comparisons until standard input ends. This is what the child process runs."""
    logging.disable()
    # Not every system has such limits.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    # Replies have a stream of their own; whatever libraries print goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import math_verify

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)

    print("true", file=out, flush=True)
    for line in sys.stdin:
        gold, response = json.loads(line)

        # math-verify looks for formulas in texts, so a bare expression is put into a box.
        marked = "$" in gold or "\\boxed" in gold
        expected = parse(gold) if marked else parse(f"\\boxed{{{gold}}}") or parse(gold)
        reply: Any = "no expression found"
        if expected:
            answer = parse(response)
            if not answer and len(response) < 200:
                answer = parse(f"\\boxed{{{response}}}")
            reply = bool(answer) and bool(
                math_verify.verify(expected, answer, timeout_seconds=None)
            )
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    _serve()
