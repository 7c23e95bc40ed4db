"""What a run on one machine lets others reach: nothing from other machines, and nothing of its ranks' store."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import pytest
from helpers.network import beyond_loopback, listening
from helpers.tiny import write

from hybridflow.backends.ray import runtime
from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.sandbox.jail import below

OTHER = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
"""Runs a command as a user that is not used otherwise."""
TOKEN = secrets.token_hex(32)
READ = "grep -r . {0}; ls {0}; cat {0}/*"


@attrs.frozen
class Seen:
    """What was seen of a run of two ranks on Ray, while it went on and after it."""

    temporary: Path
    """The system's folder for temporary files, as the run has it."""
    addresses: dict[str, str]
    modes: set[str]
    """Of the folders of the ranks' store."""
    mine: str
    """What this user reads there."""
    theirs: str
    """What another user reads there, if this one may try."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("network")
    write(folder)
    # Short, since names of sockets have at most 107 characters; and everybody may enter it.
    temporary = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))
    temporary.chmod(0o777)
    settings = ["runtime=ray", "pools.main=[2]", "actor.layout.dp=2", "run.steps=2"]
    run = subprocess.Popen(
        [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings],
        env={**os.environ, "RAY_AUTH_TOKEN": TOKEN, "TMPDIR": str(temporary)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    addresses: dict[str, str] = {}
    modes = set()
    mine = theirs = ""
    while run.poll() is None:
        addresses |= listening({str(run.pid), *below(run.pid)})
        for place in temporary.glob("hybridflow-ranks-*"):
            with contextlib.suppress(FileNotFoundError):
                modes.add(oct(place.stat().st_mode & 0o777))
            if not mine and list(place.glob("*")):
                mine = said("sh", "-c", READ.format(place))
                theirs = "" if os.geteuid() else said(*OTHER, "sh", "-c", READ.format(place))
        time.sleep(0.1)
    output = run.communicate()[0]
    assert run.returncode == 0, output
    assert TOKEN not in output
    yield Seen(temporary, addresses, modes, mine, theirs), folder
    shutil.rmtree(temporary)


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True)
    return (done.stdout + done.stderr).decode(errors="replace")


def test_f11_a_local_run_listens_on_loopback_alone(seen):
    found, _ = seen
    # Two processes of Ray with their ports, and those of two ranks.
    assert len(found.addresses) >= 6, found.addresses
    assert beyond_loopback(found.addresses) == []


def test_f11_another_user_reads_nothing_of_the_ranks_store(seen):
    found, _ = seen
    assert found.modes == {"0o700"} and not list(found.temporary.glob("hybridflow-ranks-*"))
    assert "refcount" in found.mine, found.mine  # a key of every such store
    if not os.geteuid():
        assert found.theirs.count("Permission denied") >= 3
        assert re.sub(r".*Permission denied", "", found.theirs).strip() == ""


def test_f11_another_user_does_not_enter_the_folder_of_rays_sockets_and_logs(seen):
    found, _ = seen
    folder = found.temporary / f"hybridflow-{os.getuid()}"
    assert list(folder.glob("ray/session_*/sockets/*"))  # Ray keeps them
    assert folder.stat().st_mode & 0o777 == 0o700
    if not os.geteuid():
        listed = said(*OTHER, "ls", f"{folder}/ray")
        assert "Permission denied" in listed and "session" not in listed


def test_f11_the_token_of_rays_servers_is_written_nowhere(seen):
    """Neither in the run's own files, nor in Ray's logs."""
    found, folder = seen
    assert list(folder.glob("runs/tiny/*"))
    for place in (folder, found.temporary):
        assert said("grep", "-rlF", "--devices=skip", TOKEN, str(place)) == ""


def test_f11_a_folder_that_others_may_enter_or_that_is_a_link_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"hybridflow-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(HybridFlowError, match="not a folder that belongs to this user alone"):
        runtime._own_folder()
    folder.chmod(0o700)
    assert runtime._own_folder() == f"{folder}/ray"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    with pytest.raises(HybridFlowError, match=r"runtime\.temp_dir"):
        runtime._own_folder()
    folder.unlink()
    assert runtime._own_folder() == f"{folder}/ray"
    assert folder.stat().st_mode & 0o777 == 0o700
