"""Programs in the sandbox."""

from __future__ import annotations

import textwrap

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
