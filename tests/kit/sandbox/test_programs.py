"""The sandbox: programs run, and end at their limits."""

from __future__ import annotations

import sys
import time

import pytest
from helpers.programs import run

from hybridflow.kit.sandbox.process import Limits, SandboxError
from hybridflow.kit.sandbox.programs import run_program


def test_a_machine_that_cannot_isolate_a_program_is_told_what_it_lacks(monkeypatch):
    """A jail whose root cannot be made: it is to show a Python that is not there."""
    monkeypatch.setattr(sys, "base_prefix", "/no/such/python")
    said = (
        r"\(cannot isolate: .*mount: No such file or directory\); a sandbox needs Linux namespaces"
    )
    with pytest.raises(SandboxError, match=said):
        run_program("pass")
    monkeypatch.undo()
    assert run_program("pass").good


def test_a_program_reads_writes_and_imports_the_standard_library():
    found = run(
        "import json, math, sys\nprint(json.dumps([math.pi > 3, input()]))\nprint('no', file=sys.stderr)",
        "line\n",
    )
    assert found.good and found.output == '[true, "line"]\n' and found.errors == "no\n"
    assert run("raise SystemExit(3)").status == 3
    wrong = run("1 / 0")
    assert wrong.status == 1 and "ZeroDivisionError" in wrong.errors


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(60)"], ids=["busy", "asleep"]
)
def test_time_is_limited(program):
    started = time.monotonic()
    found = run(program, limits=Limits(seconds=1.0))
    assert not found.good and found.reason in ("time", "ended") and time.monotonic() - started < 10


def test_output_is_limited():
    found = run("while True: print('x' * 1000)", limits=Limits(seconds=3.0, output_bytes=5000))
    assert found.reason == "output" and len(found.output) <= 5000


def test_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("pass")
    run("while True: pass", limits=Limits(seconds=0.5))
    assert list(tmp_path.iterdir()) == []
