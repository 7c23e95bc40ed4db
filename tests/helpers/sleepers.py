"""Processes with a page in a run's folder of pages, which sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import sys, time
from hybridflow.core.processes import page
page.begin(sys.argv[1], "writer")
print(flush=True)
time.sleep(60)
"""


@contextmanager
def sleeper(folder: Path, stopped: bool) -> Iterator[subprocess.Popen[bytes]]:
    """One that is stopped, or not, while the body runs."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        if stopped:
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
        try:
            yield child
        finally:
            child.kill()
