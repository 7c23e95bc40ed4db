"""Processes that stand still: a line names them and the remedy, which helps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid

import pytest
from helpers.paths import matrix
from helpers.tiny import REWARDS, TOLD, marked, metrics, which_are, write

APART = [
    "runtime={name='ray', threads=1}",
    "pools={main=[1], engines=[2]}",
    "actor.generation.pool=engines",
    "algorithm.correction=truncate",
    "run.max_staleness=2",
    "run.steps=40",
    "algorithm.name=rewards:Told",
]
STANDS_STILL = """

def stands_still(sample):
    seen.append(sample)
    if len(seen) == 100 and not pathlib.Path("stood").exists():
        pathlib.Path("stood").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return digits(sample)
"""
STUCK = """
import pathlib, time

from hybridflow.core import Answer, Environment


class Stuck(Environment):
    played = 0

    def step(self, turn):
        Stuck.played += 1
        if Stuck.played == 5:
            pathlib.Path("stuck").touch()
            while not pathlib.Path("free").exists():
                time.sleep(0.1)
        return Answer("1", done=True)
"""
WITHIN_S = 60


def said_of(run: subprocess.Popen, file, pattern: str, since: float) -> re.Match:
    """What a run says, within WITHIN_S of a moment."""
    while (found := re.search(pattern, file.read_text())) is None:
        assert run.poll() is None and time.monotonic() - since < WITHIN_S, file.read_text()
        time.sleep(0.2)
    return found


@matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_an_environment_that_does_not_answer_is_named_with_its_limit(runtime, tmp_path):
    write(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)
    settings = [f"runtime={{name='{runtime}'}}", "environment.name=stuck:Stuck"]
    file = tmp_path / "out.txt"
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]
    with file.open("w") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "stuck").exists():
                assert run.poll() is None and time.monotonic() < deadline, file.read_text()
                time.sleep(0.1)
            pattern = r"environment 'stuck:Stuck': nothing .* for 40 s, in 1 episode\(s\) .*environment.timeout_s"
            said_of(run, file, pattern, time.monotonic())
            (tmp_path / "free").touch()
            assert run.wait(timeout=120) == 0, file.read_text()
        finally:
            run.kill()
            run.wait()
    assert metrics(tmp_path / "runs/tiny")[-1]["step"] == 6


@matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("what", ["engine", "reward"])
def test_what_stands_still_is_named_with_what_to_do(what, tmp_path):
    write(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS + TOLD + STANDS_STILL)
    settings = [*APART, "run.restarts=1", "run.checkpoint_every=2"]
    reward = {"engine": "told", "reward": "stands_still"}[what]
    settings.append(f"reward.function=rewards:{reward}")
    file = tmp_path / "out.txt"
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000", "MARK": mark}
    done = tmp_path / "runs/tiny/metrics.jsonl"
    with file.open("w") as out:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 120
            while not done.exists() or len(done.read_text().splitlines()) < 3:
                assert run.poll() is None and time.monotonic() < deadline, file.read_text()
                time.sleep(0.1)
            if what == "engine":
                ranks = sorted(marked(mark, "ray::HostActor"))
                pid = which_are("engine", ranks, tmp_path)[0]
                os.kill(pid, signal.SIGSTOP)
                call, pool = "actor.rollout/[a-z_]+", "engines"
            else:
                call, pool = "reward/score", "cpu"
            found = said_of(
                run,
                file,
                rf"{call} has run for \d+ s \(.*?\) on rank \d of pool '{pool}' \(pid (\d+) on .*?kill it",
                time.monotonic(),
            )
            if what == "engine":
                assert int(found[1]) == pid
            os.kill(int(found[1]), signal.SIGKILL)
            assert run.wait(timeout=200) == 0, file.read_text()
        finally:
            run.kill()
            run.wait()
    said = file.read_text()
    assert said.count("restart 1 of 1") == (what == "reward")
    assert said.count("is gone: another one starts") == (what == "engine")
    assert metrics(tmp_path / "runs/tiny")[-1]["step"] == 40
