"""A program that a model wrote, run alone: nothing of it is left."""

from __future__ import annotations

import sys

from hybridflow.kit.sandbox.process import Limits, ProgramOutcome, SandboxError, lent


def run_program(
    program: str, given: str | None = None, limits: Limits | None = None
) -> ProgramOutcome:
    """Run Python text with `given` as its standard input (None: empty).

    Raises SandboxError where this machine cannot isolate the program.
    """
    with lent() as jail:
        jail.begin({}, door=False)
        outcome, _ = jail.run(python(program, "/tmp/main.py"), given or "", limits or Limits())
    return outcome


def python(program: str, file: str = "") -> dict[str, object]:
    """Return what jail.py is told of Python text, which is written to `file` before it runs."""
    return {"program": program, "file": file, "command": None, "variables": {}}


def diagnose() -> list[tuple[str, str, str]]:
    """Say for `hybridflow doctor` whether programs can run here: subject, finding, remedy."""
    if sys.platform != "linux":
        return [("sandbox", f"programs cannot run on {sys.platform}", "use Linux for them")]
    try:
        run_program("pass")
    except SandboxError as error:
        found, _, remedy = str(error).partition("; ")
        return [("sandbox", found, remedy)]
    return [("sandbox", "programs run isolated: namespaces, and a filter of system calls", "")]
