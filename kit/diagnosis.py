"""Helpers for plugins that tell `hybridflow doctor` about their packages."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

Row = tuple[str, str, str]
"""A line of the report: (subject, finding, command to type or "")."""
TIMEOUT_S = 180.0
"""Time limit of `tries`, in seconds."""


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return name -> version of those packages that are installed."""
    # The metadata alone is read; nothing is imported.
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def tries(
    code: str,
    environment: Mapping[str, str] | None = None,
) -> tuple[float, str | None]:
    """Run a piece of Python in an interpreter of its own.

    Returns (seconds, None if it ended well, else the last line of its error).
    """
    # A process of its own: a broken library may end it, and ours must not import it.
    started = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return TIMEOUT_S, f"no answer within {TIMEOUT_S:.0f} s"

    # The last line of a traceback is the error.
    error = None
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        error = lines[-1] if lines else f"exit code {process.returncode}"
    return time.perf_counter() - started, error


def import_row(module: str, environment: Mapping[str, str] | None, remedy: str) -> Row:
    """Return a row that says whether a module can be imported; `remedy` is what to type if not."""
    seconds, error = tries(f"import {module}", environment)
    if error is None:
        return (f"import {module}", f"works ({seconds:.0f} s)", "")
    return (f"import {module}", f"fails: {error}", remedy)
