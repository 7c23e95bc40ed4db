"""Runs a test file against a copy of the package, in which something is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 300


def run_tests(
    path: Path, arguments: Sequence[str], beside: Path
) -> subprocess.CompletedProcess[str] | None:
    """What pytest says, in the folder `beside`; None where it does not end.

    path: the folder of the copy, whose `hybridflow` is imported.
    """
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        return subprocess.run(
            command, cwd=beside, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return None
