"""What `show` accepts runs; what it refuses it refuses in sentences, and soon.

Twelve drawn configurations run two steps, and 72 mutated ones are shown; `make configs` has 150 over every backend
and engine that is installed, and 3,600, or HYBRIDFLOW_CONFIGS of them and 24 times as many.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.drawn_configs import drawn, mutated, toml, write_pairs
from helpers.tiny import hybridflow

from hybridflow.cli.main import main
from hybridflow.core.names import is_installed

COUNT = int(os.environ.get("HYBRIDFLOW_CONFIGS", "8"))
MANY = COUNT > 20
COMMANDS = 60 if MANY else 2
"""How many of the mutated ones the command is given."""
BATCH = 24 if MANY else 6
"""Mutated ones of a test."""
BACKENDS = {"fsdp": "torch", "deepspeed": "deepspeed", "megatron": "megatron"}
ENGINES = {"transformers": "transformers", "vllm": "vllm", "sglang": "sglang"}
"""Name -> the package that it needs."""
MACHINE = {
    "memory": r"out of memory|cannot allocate memory|GB .* usable",
    "a library that is absent": r"is not installed|pip install",
    "a port": r"[Aa]ddress already in use",
    "the disk": r"No space left on device|free disk space",
}
"""What only the machine can know (docs/configuration.md), and how it is said."""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """call(command) -> (status, all that was printed), of c.toml in the current folder, in this process."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)

    def called(command: str) -> tuple[int, str]:
        capsys.readouterr()
        status = main([command, "c.toml"])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return called


def draw(random: Random) -> dict[str, Any]:
    """A drawn configuration; of everything that is installed, where there are many."""
    if not MANY:
        return drawn(random)
    backends = [name for name, package in BACKENDS.items() if is_installed(package)]
    engines = [name for name, package in ENGINES.items() if is_installed(package)]
    return drawn(random, backends, engines, ranks=(1, 1, 2))


def here(tables: dict[str, Any]) -> bool:
    """Whether a run changes nothing of this process, and starts no other."""
    kinds = tables["actor"]["backend"]["name"], tables["rollout"]["name"]
    apart = tables["rollout"].get("own_process", False)
    return kinds == ("fsdp", "transformers") and tables["runtime"] == "inline" and not apart


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(COUNT))
def test_what_show_accepts_runs_two_steps(number, call):
    random = Random(number)
    status = 1
    while status:
        tables = draw(random)
        Path("c.toml").write_text(toml(tables))
        status, printed = call("show")
        assert status in (0, 1) and "Traceback" not in printed, f"{toml(tables)}\n{printed}"
        if not MANY and not here(tables):
            status = 1
    if here(tables):
        status, printed = call("run")
    else:
        result = hybridflow(Path(), "run", "c.toml", timeout=600)
        status, printed = result.returncode, result.stdout + result.stderr
    reasons = [name for name, text in MACHINE.items() if re.search(text, printed)]
    assert status == 0 or reasons, f"{toml(tables)}\n{printed}"


class TooLong(BaseException):
    """`show` has worked for more than five seconds: of the processor, which other tests take too."""


def too_long(number: int, frame: Any) -> None:
    raise TooLong


@pytest.mark.parametrize("number", range(COUNT))
def test_a_mutated_one_is_refused_or_accepted_in_sentences(number, call):
    random = Random(10**6 + number)
    Path("c.toml").write_text(toml(drawn(random)))
    call("show")  # imports take longer than that
    previous = signal.signal(signal.SIGPROF, too_long)
    try:
        for _ in range(BATCH):
            text = toml(mutated(random, drawn(random)))
            Path("c.toml").write_text(text)
            signal.setitimer(signal.ITIMER_PROF, 5)
            try:
                status, printed = call("show")
            except BaseException as error:
                raise AssertionError(f"{text}\n{type(error).__name__}") from error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            assert status in (0, 1) and "Traceback" not in printed, f"{text}\n{printed}"
    finally:
        signal.signal(signal.SIGPROF, previous)


@pytest.mark.parametrize("number", range(COMMANDS))
def test_the_command_says_the_same_of_a_mutated_one(number, tmp_path):
    random = Random(2 * 10**6 + number)
    text = toml(mutated(random, drawn(random)))
    (tmp_path / "c.toml").write_text(text)
    result = hybridflow(tmp_path, "show", "c.toml")
    assert result.returncode in (0, 1), text + result.stderr
    assert "Traceback" not in result.stdout + result.stderr, text + result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]
