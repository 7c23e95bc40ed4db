"""Processes that stand still, or are gone: a line names them and what they do, and the run goes on or ends.

Each is a run as a user starts it, with a patience of a few seconds.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest
from helpers.paths import matrix
from helpers.tiny import REWARDS, write
from helpers.watched import WatchedRun

from hybridflow.cli.stacks import stacks
from hybridflow.core.processes.look import state_of

RAY = "runtime={name='ray', threads=1}"
LONG = "run.steps=2000"
KEPT = ("run.restarts=1", "run.checkpoint_every=2")
APART = (
    RAY,
    "pools={main=[1], engines=[2]}",
    "actor.generation.pool=engines",
    "algorithm.correction=truncate",
    "run.max_staleness=2",
)
HANGS = """
import time


def fetch(url):
    time.sleep(3600)


def hangs(sample):
    seen.append(sample)
    if len(seen) > 40:
        fetch("http://nowhere")
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
            while not pathlib.Path("free").exists():
                time.sleep(0.1)
        return Answer("1", done=True)
"""
WITHIN_S = 30.0
"""Seconds after the patience within which what is wrong must be named."""


@pytest.fixture
def run(tmp_path):
    write(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS + HANGS)
    (tmp_path / "stuck.py").write_text(STUCK)
    started = []

    def start(*settings: str, patience_s: float = 4.0) -> WatchedRun:
        one = WatchedRun(tmp_path, *settings, f"run.patience_s={patience_s}")
        started.append(one)
        return one.__enter__()

    yield start
    for one in started:
        one.__exit__()


@pytest.mark.timeout(300)
def test_a_stopped_rank_is_named_while_its_peer_waits_and_is_replaced_by_a_restart(run):
    one = run(RAY, "pools.main=[2]", "run.steps=120", "run.hang=restart", *KEPT, "run.report=false")
    one.steps(5)
    rank = one.look("rank 1 of pool 'main'")
    os.kill(rank.pid, signal.SIGSTOP)
    stopped = rf"rank 1 of pool 'main' \(pid {rank.pid} on \S+\) is stopped \(SIGSTOP\); "
    said = one.said(rf"step \d+ waits for actor/.*{stopped}.*", WITHIN_S + 4)[0]
    assert f"kill -CONT {rank.pid} lets it go on" in said
    assert 'It is ended now (run.hang = "restart")' in said
    assert "rank 0 of pool 'main' waits for it (" in said or "rank 0" not in said
    assert one.ends() == 0, one.output
    assert one.last_step == 120 and one.output.count("restart 1 of 1") == 1
    assert not (one.kept / "processes").exists() and state_of(rank.pid) == "gone"


@pytest.mark.timeout(300)
def test_without_its_gcs_a_run_says_so_and_goes_on_with_another_ray(run):
    one = run(RAY, "run.steps=60", *KEPT, "run.report=false")
    one.steps(5)
    gcs = one.look("the gcs_server of the local Ray")
    os.kill(gcs.pid, signal.SIGKILL)
    said = one.said(
        r"the gcs_server of the local Ray \(pid (\d+)\) has ended by signal 9", WITHIN_S
    )
    assert int(said[1]) == gcs.pid
    assert one.ends() == 0, one.output
    assert one.last_step == 60 and one.output.count("restart 1 of 1") == 1


@pytest.mark.timeout(300)
def test_a_reward_that_hangs_is_named_with_its_row_and_line_and_the_run_ends(run):
    """Also what `hybridflow stacks` says of it meanwhile."""
    one = run("reward.function=rewards:hangs", "run.hang=end", patience_s=6.0)

    def shown() -> str:
        return "\n".join(stacks(one.kept)) if (one.kept / "processes").exists() else ""

    told = one.until(lambda: re.search(r"reward 'hangs', row (\d+), for", shown()))
    text = shown()
    assert text.startswith("controller (pid ") and "at work, last moved" in text
    assert f"thread {one.look('controller').notes[-1].thread:#x}, at reward" in text
    assert re.search(
        r"      fetch \(\S*rewards\.py:\d+\)\n      hangs \(\S*rewards\.py:\d+\)\n", text
    )
    said = one.said(r"step 3 waits for reward/score, .*", WITHIN_S + 6)[0]
    assert f"is at reward 'hangs', row {told[1]} for" in said and "in fetch (" in said
    assert one.ends(WITHIN_S) == 75
    last = one.output.splitlines()[-1]
    assert last.startswith("hybridflow: controller") and "the run has ended by run.hang" in last


@matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["say", "restart"])
def test_a_stalled_engine_is_named_and_goes_on_or_is_started_again(run, how):
    engine = ("rollout.own_process=true", "rollout.restarts=1", f"run.hang={how}")
    one = run(RAY, "run.steps=120", *engine, "run.report=false")
    one.steps(5)
    pid = one.look("engine of rank 0 of pool 'main'").pid
    os.kill(pid, signal.SIGSTOP)
    said = one.said(r"step \d+ waits for actor/generate, .*", WITHIN_S + 4)[0]
    assert f"engine of rank 0 of pool 'main' (pid {pid} on" in said
    if how == "say":
        os.kill(pid, signal.SIGCONT)
    assert one.ends() == 0, one.output
    assert one.last_step == 120 and "restart 1 of 1, from the newest" not in one.output
    assert "actor/generate goes on, after" in one.output


@matrix
@pytest.mark.timeout(400)
def test_an_engine_that_never_stops_and_stands_still_is_replaced(run):
    one = run(*APART, "run.steps=60", "run.hang=restart", "run.report=false")
    one.steps(3)
    pid = one.look("rank 1 of pool 'engines'").pid
    os.kill(pid, signal.SIGSTOP)
    one.said(rf"rank 1 of pool 'engines' \(pid {pid} on \S+\) is stopped", WITHIN_S + 4)
    assert one.ends(200) == 0, one.output
    assert one.output.count("is gone: another one starts") == 1 and one.last_step == 60


@matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("service", ["gcs_server", "raylet"])
@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_run_whose_ray_is_broken_ends_at_once_when_it_is_asked_to(run, service, sent):
    """Without restarts: a dead one ends the run, a stopped one does not keep it from ending."""
    one = run(RAY, LONG, "run.report=false")
    one.steps(5)
    os.kill(one.look(f"the {service} of the local Ray").pid, sent)
    if sent == signal.SIGSTOP:
        one.process.send_signal(signal.SIGINT)
    assert one.ends(WITHIN_S) == (75 if sent == signal.SIGKILL else 130), one.output
    last = one.output.splitlines()[-1]
    dead = sent == signal.SIGKILL
    assert f"the {service} of the local Ray" in last if dead else last == "hybridflow: interrupted"


@matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_an_environment_that_does_not_answer_is_named_with_its_episode(run, runtime, tmp_path):
    one = run(f"runtime={{name='{runtime}', threads=1}}", "environment.name=stuck:Stuck")
    said = one.said(r"step \d+ waits for actor/episodes, .*", WITHIN_S + 60)[0]
    found = re.search(
        r"environment 'stuck:Stuck': episode (\d+) for \d+ s, in step \(\S+stuck.py:", said
    )
    assert f"answers to episode {found[1]} for" in said
    (tmp_path / "free").touch()
    assert one.ends() == 0, one.output
    assert one.last_step == 6


@matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_a_full_disk_is_named_and_the_checkpoint_before_is_gone_on_from(run, runtime, tmp_path):
    """A file system of 4 MB, which a checkpoint of 1.2 MB fills."""
    (tmp_path / "runs").mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "runs")]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        one = run(
            f"runtime={{name='{runtime}', threads=1}}",
            *("run.steps=12", "run.checkpoint_every=2", "run.keep_checkpoints=9"),
            *("run.report=false", "run.export=false"),
        )
        assert one.ends() == 1, one.output
        last = one.output.strip().splitlines()[-1]
        assert "No space left on device" in last and "Traceback" not in one.output
        found = re.search(r"the checkpoint of step (\d+) is complete.*free disk space", last)
        assert found is not None, last
        subprocess.run(["mount", "-o", "remount,size=40m", str(tmp_path / "runs")], check=True)
        again = run(*one.command[5:-1], "--resume")
        assert again.ends() == 0, again.output
        assert f"resuming after step {found[1]}" in again.output and again.last_step == 12
    finally:
        subprocess.run(["umount", str(tmp_path / "runs")], check=True)
