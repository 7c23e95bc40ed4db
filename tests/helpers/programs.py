"""Programs in the sandbox."""

from __future__ import annotations

import os
import textwrap
import time

import pytest

from hybridflow.kit.sandbox.process import Limits, ProgramOutcome, SandboxError
from hybridflow.kit.sandbox.programs import run_program

AMPLE = Limits(seconds=20.0)
"""More than a program needs, also beside other work."""


def run(program: str, given: str | None = None, limits: Limits = AMPLE) -> ProgramOutcome:
    """Skips the test where this machine does not let a program run apart from it."""
    try:
        return run_program(textwrap.dedent(program), given, limits)
    except SandboxError as error:
        pytest.skip(str(error))


def ends(process: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time that is no child of this one, and so is not waited for."""
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/{process}"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
