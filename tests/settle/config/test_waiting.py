"""How threads wait, which is decided before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hybridflow.settle.config.waiting import VARIABLE, wait_briefly, waiting_variables


@pytest.fixture
def early(monkeypatch):
    """As before torch is imported."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    # Set first, so that they are put back.
    for name in (VARIABLE, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_threads_wait_briefly_if_nobody_says_otherwise(early):
    assert wait_briefly({"runtime": "inline", "stages": {"a": {"runtime": {"threads": 2}}}})
    assert os.environ[VARIABLE] == "2000"


@pytest.mark.parametrize(
    "tables",
    [
        {"runtime": {"name": "inline", "spin": True}},
        {"runtime": {"name": "inline", "inline": {"spin": True}}},
        {"stages": {"second": {"runtime": {"spin": True}}}},
    ],
)
def test_a_runtime_that_spins_leaves_them_alone(early, tables):
    assert wait_briefly(tables) and VARIABLE not in os.environ


def test_what_the_environment_says_stays(early, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert wait_briefly({}) and VARIABLE not in os.environ
    assert waiting_variables(False) == {}
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert waiting_variables(False) == {VARIABLE: "2000"} and waiting_variables(True) == {}
    monkeypatch.setenv(VARIABLE, "7")
    assert wait_briefly({}) and os.environ[VARIABLE] == "7"


def test_after_torch_was_imported_it_is_too_late(early, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert not wait_briefly({}) and VARIABLE not in os.environ
    assert wait_briefly({"runtime": {"spin": True}})


def test_the_command_decides_before_torch_is_imported(tmp_path):
    """A reward in the run's own process sees what was set, and whether torch came before it."""
    (tmp_path / "no.toml").write_text("[run]\nstepz = 1\n")
    code = (
        "import os, sys\n"
        "import hybridflow.settle.config.waiting as waiting\n"
        "original = waiting.wait_briefly\n"
        "import hybridflow.cli.run as command\n"
        "def watched(tables):\n"
        "    print('torch' in sys.modules, original(tables), os.environ.get(waiting.VARIABLE))\n"
        "command.wait_briefly = watched\n"
        "from hybridflow.cli.main import main\n"
        "main(['run', 'no.toml'])\n"
    )
    environment = {
        key: value for key, value in os.environ.items() if key not in (VARIABLE, "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[0] == "False True 2000", done.stderr
