"""What is wrong is said before anything starts, or names where it happened; and nothing is lost."""

import json
import subprocess
import time
import uuid

import pytest
from helpers.tiny import hybridflow, marked, ran, write


def refused(folder, *arguments):
    """The message of a run that must not start; nothing is left in its folder."""
    result = hybridflow(folder, "run", "tiny.toml", *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "starting" not in result.stdout
    return result.stderr


def test_a_layout_that_does_not_divide_the_devices_says_how_to_fix_it(tmp_path):
    write(tmp_path)
    message = refused(tmp_path, "pools.main=[3]", "actor.layout.dp=2", "runtime=ray")
    assert "actor.layout" in message and "pools.main" in message


def test_a_full_disk_at_checkpoint_time_leaves_the_old_checkpoint_whole(tmp_path):
    write(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:  # a checkpoint of this model takes about 1 MB: the first fits, the second does not
        settings = ("run.folder=disk", "run.checkpoint_every=1")
        result = hybridflow(tmp_path, "run", "tiny.toml", *settings)
        assert result.returncode == 1
        assert "the checkpoint of step 2 could not be written" in result.stderr
        assert "the checkpoint of step 1 is complete" in result.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        resumed = ran(tmp_path, *settings, "--resume")
        assert "resuming after step 1" in resumed.stdout
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_worker_killed_in_a_step_ends_the_run_with_rank_role_and_phase(tmp_path, monkeypatch):
    write(tmp_path)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    started = time.monotonic()
    result = hybridflow(
        tmp_path,
        "run",
        "tiny.toml",
        "runtime=ray",
        "pools.main=[2]",
        "reward.function=rewards:kills_itself",
        "reward.options={at=20}",
    )
    assert result.returncode == 1, result.stdout
    assert time.monotonic() - started < 120  # the start of Ray and of two ranks included
    assert (
        "is gone" in result.stderr
        and "role 'reward'" in result.stderr
        and "phase 'score'" in result.stderr
    )
    assert "rank 0" in result.stderr or "rank 1" in result.stderr
    deadline = time.monotonic() + 10
    while (left := marked(mark, "")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def test_a_run_whose_worker_was_killed_restarts_from_its_checkpoint_when_it_may(tmp_path):
    write(tmp_path)
    flag = f'reward.options={{flag="{tmp_path}/flag", at=40}}'
    pools = ("pools.main=[1]", "pools.engines=[1]", "actor.generation.pool=engines")
    settings = ("run.restarts=1", "run.checkpoint_every=1", "run.steps=4", "runtime=ray", *pools)
    result = ran(tmp_path, *settings, "reward.function=rewards:kills_itself", flag)
    assert "restart 1 of 1" in result.stdout and "resuming after step 2" in result.stdout
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4]
