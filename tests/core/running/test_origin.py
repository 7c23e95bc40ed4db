"""How a run was started is told as it was, without keys."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hybridflow.core.running import origin as module
from hybridflow.core.running.origin import git_state, origin, without_keys


@pytest.fixture
def repository(tmp_path):
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            *arguments,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "work")
    (tmp_path / "first.py").write_text("1\n")
    (tmp_path / "a b.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    return tmp_path, git


def test_git_is_told_with_the_files_that_were_changed(repository):
    folder, git = repository
    commit = git("rev-parse", "HEAD")
    assert git_state(folder) == {"commit": commit, "branch": "work", "changed": []}
    (folder / "first.py").write_text("2\n")
    (folder / "new.py").write_text("1\n")  # git does not know it
    git("checkout", "-q", "--detach")
    assert git_state(folder) == {"commit": commit, "branch": None, "changed": ["first.py"]}


def test_without_a_repository_or_git_there_is_no_state(repository, tmp_path_factory, monkeypatch):
    folder, _ = repository
    assert git_state(tmp_path_factory.mktemp("elsewhere")) is None
    monkeypatch.setattr(module, "GIT_S", 0.0)
    assert git_state(folder) is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_state(folder) is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("reward.options.api_key=sk-1=2", "reward.options.api_key=***"),
        ("run.trackers=[{ name = 'w', token='x' }]", "run.trackers=[{ name = 'w', token=***"),
        ('reward.options={ apiKey = "x" }', "reward.options={ apiKey =***"),
        ("HF_TOKEN=abc", "HF_TOKEN=***"),
        ("reward.options.password=", "reward.options.password=***"),
        ("sampling.max_tokens=256", "sampling.max_tokens=256"),
        ("tokenizer.characters=abc", "tokenizer.characters=abc"),
        ("rollout.kv_tokens=4096", "rollout.kv_tokens=4096"),
        ("data.key_column=question", "data.key_column=question"),
    ],
)
def test_the_values_of_keys_are_left_out(word, said):
    assert without_keys(["run", word]) == ["run", said]


def test_the_machine_and_the_command_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hybridflow", "run", "a.toml", "reward.options.key=1"])
    found = json.loads(json.dumps(origin(tmp_path)))
    assert found["command"] == ["hybridflow", "run", "a.toml", "reward.options.key=***"]
    assert found["folder"] == str(tmp_path) and found["git"] is None
    with open("/proc/meminfo") as file:
        kilobytes = int(file.readline().split()[1])
    assert found["host"]["memory_gb"] == pytest.approx(kilobytes * 1024 / 1e9, rel=0.05)
    assert found["time"].endswith("+00:00")
