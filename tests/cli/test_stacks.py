"""`hybridflow stacks`: every process of a run, what it does, and the stacks of its threads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from helpers.waiting import eventually

from hybridflow.cli import stacks as module
from hybridflow.cli.main import main
from hybridflow.core.processes import look as looking, page
from hybridflow.core.processes.look import looks, state_of

PROGRAM = """
import subprocess, sys, time
from hybridflow.core.processes.page import begin, doing

begin(sys.argv[1], sys.argv[2])
subprocess.Popen(["sleep", "61"])

def waits_here():
    time.sleep(60)

with doing("actor/generate"), doing("the engine (pid 7): start", limit_s=500):
    waits_here()
"""


@pytest.fixture
def processes(tmp_path):
    """Two processes with pages, of one run."""
    folder = tmp_path / "run/processes"
    started = {}
    for name in ("controller", "rank 0 of pool 'main'"):
        command = [sys.executable, "-c", PROGRAM, str(folder), name]
        started[name] = subprocess.Popen(command, start_new_session=True)
    eventually(lambda: len([one for one in looks(folder) if len(one.notes) == 2]) == 2)
    eventually(lambda: all(looking.descendants(one.pid) for one in started.values()))
    yield started
    for process in started.values():
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def printed(folder, capsys) -> str:
    assert main(["stacks", str(folder)]) == 0
    return capsys.readouterr().out


def test_each_process_says_what_it_does_and_where_the_controller_first(processes, tmp_path, capsys):
    text = eventually(
        lambda: (out := printed(tmp_path / "run", capsys)).count("waits_here") == 2 and out
    )
    first, second = text.strip().split("\n\n")
    pid = processes["controller"].pid
    assert re.match(rf"controller \(pid {pid} on \S+\): at work, last moved \d s ago\n", first)
    assert "\n  actor/generate, for 0 s" in first or "\n  actor/generate, for " in first
    assert re.search(
        r"\n  the engine \(pid 7\): start, for \d+ s, at most (500|49\d) s more\n", first
    )
    assert (
        "at the engine (pid 7): start\n      waits_here (<string>:9)\n      <module> (<string>:12)"
        in first
    )
    # What a rank has started is an engine's, perhaps; the controller's are its runtime's own.
    assert "started pid" not in first
    assert re.search(r"\n  started pid \d+: sleep 61", second)


def test_a_stopped_process_has_no_stacks_without_py_spy(processes, tmp_path, capsys, monkeypatch):
    rank = processes["rank 0 of pool 'main'"]
    rank.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(rank.pid) == "stopped")
    monkeypatch.setattr(looking.shutil, "which", lambda name: None)
    text = printed(tmp_path / "run", capsys)
    assert f"rank 0 of pool 'main' (pid {rank.pid} on" in text and "): stopped, last moved" in text
    said = "no stacks: it is stopped, and writes them when it goes on; py-spy (pip install py-spy) may look"
    assert said in text
    monkeypatch.setattr(module, "spied", lambda pid: f"py-spy's stack of {pid}\n")
    assert f"    py-spy's stack of {rank.pid}\n" in printed(tmp_path / "run", capsys)


def test_the_folder_around_the_stages_of_a_run_is_found_too(processes, tmp_path, capsys):
    assert "controller (pid" in printed(tmp_path, capsys)


def test_services_and_processes_that_are_gone_or_elsewhere_are_named(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run/processes"
    folder.mkdir(parents=True)
    page.write_page(folder / "here-1.page", os.getpid(), "the raylet of the local Ray")
    ended = subprocess.Popen(["true"])
    ended.wait()
    page.write_page(folder / "here-2.page", ended.pid, "rank 1 of pool 'main'")
    text = printed(tmp_path / "run", capsys)
    assert f"the raylet of the local Ray (pid {os.getpid()} on" in text and "no stacks" not in text
    assert f"rank 1 of pool 'main' (pid {ended.pid} on" in text and "): gone\n" in text
    for place in (looking, module):
        monkeypatch.setattr(place, "here", lambda: "another machine")
    assert "it is on another machine; run this there too" in printed(tmp_path / "run", capsys)


def test_a_folder_without_a_run_that_goes_on_is_refused_with_what_to_do(tmp_path, capsys):
    assert main(["stacks", str(tmp_path)]) == 1
    assert "no process of a run says here what it does" in capsys.readouterr().err
