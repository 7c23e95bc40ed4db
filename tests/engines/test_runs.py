"""Whole runs with engines in processes of their own: kills, and what is left behind. The learning is the tiny one's."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from helpers.paths import EVERY, matrix
from helpers.shared_memory import in_shared_memory, mapped_by
from helpers.tiny import killing, learning, marked, ran, write

WIDER = {"hidden_size = 64": "hidden_size = 128"}  # heads of 32, the least that vLLM takes on a CPU
ENGINES = {
    "vllm": ["rollout.name=vllm", "rollout.own_process=true", "rollout.kv_memory_gb=0.05"],
    "sglang": ["rollout.name=sglang", "rollout.kv_tokens=4096"],
}


@matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ENGINES)
def test_kills_change_nothing_but_the_count_of_restarts(tmp_path, name):
    pytest.importorskip(name)
    kills, steps = (5, 20) if EVERY else (1, 5)
    settings = [f"run.steps={steps}", *ENGINES[name]]
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    for folder in (whole, hit):
        folder.mkdir()
        write(folder, **WIDER)
    ran(whole, *settings)
    code, out, killed = killing(
        hit, kills, "run", "tiny.toml", *settings, "rollout.restarts=5", timeout=800
    )
    assert code == 0 and killed == kills, out
    undisturbed, disturbed = learning(whole / "runs/tiny"), learning(hit / "runs/tiny")
    assert sum(row["actor/engine_restarts"] for row in disturbed) == kills
    assert len(disturbed) == steps
    for one, other in zip(disturbed, undisturbed, strict=True):
        # Which sequences are decoded together depends on the clock, so the last bits differ; tokens and rewards do not.
        for name in ("reward/scores", "actor/response_length", "actor/clipped"):
            assert one[name] == other[name], (one["step"], name)
        assert one["actor/mismatch_mean"] < 1e-4
        assert one["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-2, abs=1e-4)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["vllm", "sglang"])
@matrix
def test_steps_are_generated_ahead_in_a_pool_of_the_engines(tmp_path, name):
    pytest.importorskip(name)
    write(tmp_path, **WIDER)
    apart = ["runtime=ray", "pools={main=[1], engines=[1]}", "actor.generation.pool=engines"]
    ahead = ["run.max_staleness=1", "algorithm.correction=truncate", "run.steps=4"]
    ran(tmp_path, *apart, *ahead, *ENGINES[name])
    rows = learning(tmp_path / "runs/tiny")
    assert [row["actor/staleness"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert all(0 < row["actor/mismatch_mean"] < 1e-4 for row in rows)  # of probes


@matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks_of_engines_that_never_stop(tmp_path, name, tp):
    """Two replicas, or one on both; each replica has a process group of its own."""
    pytest.importorskip(name)
    write(tmp_path, **WIDER)
    apart = ["runtime=ray", "pools={main=[1], engines=[2]}", "actor.generation.pool=engines"]
    apart += [f"actor.generation.tp={tp}", "run.max_staleness=2", "algorithm.correction=truncate"]
    # vLLM in a process of its own has one rank.
    engine = [one for one in ENGINES[name] if tp == 1 or "own_process" not in one]
    ran(tmp_path, *apart, "run.steps=6", *engine)
    rows = learning(tmp_path / "runs/tiny")
    lags = [row["actor/staleness_max"] for row in rows]
    assert len(rows) == 6 and lags[0] == 0.0 and 0 < max(lags) <= 2.0
    assert all(0 < row["actor/mismatch_mean"] < 1e-4 for row in rows)  # of probes


@matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ENGINES)
def test_responses_outlive_a_step(tmp_path, name):
    pytest.importorskip(name)
    write(tmp_path, **WIDER)
    carried = [
        "run.max_staleness=2",
        "algorithm.correction=truncate",
        "run.steps=5",
        "sampling.max_tokens=24",
    ]
    ran(tmp_path, *carried, *ENGINES[name])
    rows = learning(tmp_path / "runs/tiny")
    lags = [row["actor/staleness_max"] for row in rows]
    assert lags[0] == 0.0 and max(lags) == 2.0
    # When a phase ends depends on the clock; where it has made any tokens of its own step, they are compared.
    assert all(row.get("actor/mismatch_mean", 0.0) < 1e-4 for row in rows)


@matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ENGINES)
def test_in_bfloat16_an_engine_says_nearly_what_the_trainer_does(tmp_path, name):
    pytest.importorskip(name)
    write(tmp_path, **WIDER)
    half = ["actor.backend.precision=bf16", "rollout.dtype=bfloat16"]
    settings = ["run.steps=4", "actor.optimizer.lr=0.003", *half, *ENGINES[name]]
    ran(tmp_path, *settings)
    means = [row["actor/mismatch_mean"] for row in learning(tmp_path / "runs/tiny")]
    # Both compute in bfloat16, each in its own order: 0 would be no bfloat16.
    assert len(means) == 4 and all(1e-5 < mean < 0.02 for mean in means), means


def _wait_gone(
    mark: str, before: set[str], mapped: set[str], temporary: Path, seconds: float
) -> tuple[list[int], set[str], list[Path]]:
    """Wait until a run has left nothing; return its processes and files that are there still.

    temporary: its folder for temporary files. mapped: what its processes were seen to have mapped; the names of semaphores do
    not say whose they are, and tests that run beside this one kill engines too.
    """
    deadline = time.monotonic() + seconds
    while True:
        processes = marked(mark, "")
        left = in_shared_memory() - before
        left = {name for name in left if name in mapped or not name.startswith("sem.mp-")}
        folders = [*temporary.glob("hybridflow-engine-*"), *temporary.glob("hybridflow-ranks-*")]
        if not (processes or left or folders) or time.monotonic() > deadline:
            return processes, left, folders
        time.sleep(0.5)


ENDS = ("normal", "exception", "interrupt", "kill")
CASES = list(itertools.product(ENGINES, ("inline", "ray"), ENDS))
SLICE = [("vllm", "inline", "interrupt")]
"""A killed run of Ray ends in the default suite too (tests/backends/ray); runs of other tests end normally and with errors."""


@pytest.mark.parametrize(("name", "runtime", "end"), CASES if EVERY else SLICE)
@pytest.mark.timeout(400)
def test_nothing_is_left_behind(tmp_path, short, name, runtime, end):
    pytest.importorskip(name)
    engine = ENGINES[name]
    write(tmp_path, **WIDER)
    mark = uuid.uuid4().hex
    before = in_shared_memory()
    mapped: set[str] = set()
    steps = {"normal": "run.steps=2", "exception": "run.steps=50"}.get(end, "run.steps=10000")
    settings = [steps, f"runtime.name={runtime}", *engine]
    if end == "exception":
        settings.append("reward.function=rewards:raises_later")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARK": mark, "TMPDIR": str(short)}
    command = [sys.executable, "-m", "hybridflow.cli.main", "run", "tiny.toml", *settings]
    with (tmp_path / "out.txt").open("w") as out:
        run = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
        )  # fmt: skip
        metrics = tmp_path / "runs/tiny/metrics.jsonl"
        if end in ("interrupt", "kill"):
            while run.poll() is None and not (
                metrics.exists() and len(metrics.read_text().splitlines()) >= 2
            ):
                time.sleep(0.2)
            mapped |= mapped_by(marked(mark, ""))
            run.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
        deadline = time.monotonic() + 300
        while run.poll() is None:
            assert time.monotonic() < deadline
            mapped |= mapped_by(marked(mark, ""))
            time.sleep(0.2)
        code = run.wait()
    text = (tmp_path / "out.txt").read_text()
    assert (code == 0) == (end == "normal"), text
    if end == "exception":
        assert "no such unit" in text and metrics.exists(), text
    left = _wait_gone(mark, before, mapped, short, 30 if end == "kill" else 10)
    assert left == ([], set(), []), text
