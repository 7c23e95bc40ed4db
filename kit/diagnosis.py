"""What `hybridflow doctor` asks a plugin about its packages: rows of (what, what was found, what to type)."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

Row = tuple[str, str, str]
TIMEOUT_S = 180.0


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Those of the packages that are installed, with their versions."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def tries(code: str, environment: Mapping[str, str] | None = None) -> tuple[float, str | None]:
    """(seconds, None or the last line of the error) of a piece of Python in an interpreter of its own."""
    started = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return TIMEOUT_S, f"no answer within {TIMEOUT_S:.0f} s"
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    failed = (lines[-1] if lines else f"exit code {ran.returncode}") if ran.returncode else None
    return time.perf_counter() - started, failed


def import_row(module: str, environment: Mapping[str, str] | None, remedy: str) -> Row:
    """Whether a module can be imported; `remedy`: what to type if it cannot."""
    seconds, error = tries(f"import {module}", environment)
    if error is None:
        return (f"import {module}", f"works ({seconds:.0f} s)", "")
    return (f"import {module}", f"fails: {error}", remedy)
