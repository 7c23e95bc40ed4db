"""The commands around a run with engines in processes of their own: what they say is what the embedded one does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.paths import matrix
from helpers.tiny import hybridflow, ran, write

WIDER = {"hidden_size = 64": "hidden_size = 128"}  # heads of 32, the least that vLLM takes on a CPU
ENGINES = {
    "vllm": ["--engine", "vllm", "rollout.own_process=true", "rollout.kv_memory_gb=0.05"],
    "sglang": ["--engine", "sglang", "rollout.kv_tokens=4096"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The current folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("inference")
    write(folder, **WIDER)
    ran(folder, "run.steps=2", "actor.optimizer.lr=0.003")
    return folder


def greedy(folder, name: str, *engine: str) -> list[dict]:
    """The responses to the run's first rows, and their scores."""
    out = folder / name
    settings = ["--data", "arithmetic", "validation.data.limit=8", "--out", str(out)]
    done = hybridflow(folder, "evaluate", "runs/tiny", *settings, *engine)
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = out.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENGINES)
def test_another_engine_says_the_same(trained, name):
    pytest.importorskip(name)
    expected = greedy(trained, f"embedded-{name}")
    assert len(expected) == 8 and greedy(trained, name, *ENGINES[name]) == expected

    # A conversation, in plain lines
    command = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "chat",
        "runs/tiny",
        "--greedy",
        "--plain",
    ]
    said = []
    for engine in ([], ENGINES[name]):
        done = subprocess.run(
            [*command, *engine],
            cwd=trained,
            input="".join(f"{row['prompt']}\n" for row in expected[:2]),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and len(said[0].splitlines()) == 2
