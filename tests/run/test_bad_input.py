"""What is wrong is said before anything starts, or names where it happened; and nothing is lost."""

import subprocess
import time
import uuid

import pytest
from helpers.paths import matrix
from helpers.tiny import hybridflow, marked, metrics, ran_here, write


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


@matrix
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
        assert "resuming after step 1" in ran_here(tmp_path, *settings, "--resume")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@matrix
def test_a_killed_worker_is_named_and_the_run_goes_on_from_its_checkpoint_as_often_as_it_may(
    tmp_path, monkeypatch
):
    write(tmp_path)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)
    # Call 40 of a process is in step 3: once of the first one, and once of that which goes on after step 2.
    result = hybridflow(
        tmp_path,
        "run",
        "tiny.toml",
        "run.restarts=1",
        "run.checkpoint_every=1",
        "runtime=ray",
        "reward.function=rewards:always_kills_itself",
        "reward.options.at=40",
    )
    gone = "the process of rank 0 of pool 'main' is gone"
    assert gone in result.stdout and "restart 1 of 1" in result.stdout, result.stdout
    assert "resuming after step 2" in result.stdout
    assert result.returncode == 1 and gone in result.stderr
    assert "[role 'reward', phase 'score', rank 0]" in result.stderr
    assert [row["step"] for row in metrics(tmp_path / "runs/tiny")] == [1, 2, 3, 4]
    deadline = time.monotonic() + 10
    while (left := marked(mark, "")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
