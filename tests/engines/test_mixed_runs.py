"""Whole runs with a backend of its own for each role, and what happens when one of their ranks dies."""

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
from helpers.tiny import hybridflow, learning, marked, ran_here, write
from run.test_resume import PPO, same_weights

RAY = ["runtime=ray", "pools.main=[2]"]
MIXED = [
    *RAY, "actor.backend.name=megatron", "actor.layout.tp=2", "actor.backend.sequence_parallel=true",
    "critic.backend.name=fsdp", "critic.layout.tp=1", "ref.backend.name=deepspeed", "ref.layout.tp=1",
    'critic.model.config={ model_type = "llama", vocab_size = 16, hidden_size = 96, num_hidden_layers = 3, '
    "num_attention_heads = 4, num_key_value_heads = 4, intermediate_size = 128, max_position_embeddings = 32 }",
]  # fmt: skip
BACKENDS = {
    "fsdp": RAY,
    "megatron": [*RAY, "actor.backend.name=megatron", "actor.layout.pp=2"],
    "deepspeed": [*RAY, "actor.backend.name=deepspeed"],
}


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("ray")
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")


@pytest.mark.timeout(600)
@matrix
def test_roles_of_three_backends_train_together_and_resume_bit_for_bit(tmp_path):
    """Actor megatron with tp 2, a larger critic of another architecture fsdp with dp 2, reference deepspeed ZeRO-3."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = [*MIXED, "run.checkpoint_every=2", "run.export=true", "run.steps=4"]
    for folder in (whole, cut):
        folder.mkdir()
        write(folder, **PPO)
    ran_here(whole, *settings)
    ran_here(cut, *settings, "run.steps=2")
    ran_here(cut, *settings, "--resume")
    assert learning(cut / "runs/tiny") == learning(whole / "runs/tiny")
    assert all(row["actor/mismatch_mean"] < 1e-4 for row in learning(whole / "runs/tiny"))
    for role in ("actor", "critic"):
        assert same_weights(cut / "runs/tiny/export" / role, whole / "runs/tiny/export" / role)


@matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp"])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(tmp_path, backend):
    write(tmp_path)
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARK": mark}
    command = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "run",
        "tiny.toml",
        "run.steps=10000",
        *BACKENDS[backend],
    ]
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    with (tmp_path / "out.txt").open("w") as out:
        run = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        while run.poll() is None and not (
            metrics.exists() and len(metrics.read_text().splitlines()) >= 2
        ):
            time.sleep(0.1)
        ranks = marked(mark, "ray::HostActor")
        assert len(ranks) == 2 and run.poll() is None, (tmp_path / "out.txt").read_text()
        killed = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        code = run.wait(60)
    text = (tmp_path / "out.txt").read_text()
    assert code == 1 and re.search(r"the process of rank [01] of pool 'main' is gone", text), text
    assert re.search(r"\[role '\w+', phase '\w+', rank [01]\]", text), text
    while marked(mark, "ray::HostActor") and time.monotonic() < killed + 60:
        time.sleep(0.2)
    assert not marked(mark, "ray::HostActor")


def test_what_a_backend_cannot_do_is_said_before_anything_starts(tmp_path):
    write(tmp_path)
    wrong = [
        "actor.backend.name=deepspeed", "actor.layout.tp=2", "runtime=ray", "pools.main=[2]",
        "actor.backend.precision=bf16", "actor.backend.stage=1",
    ]  # fmt: skip
    said = hybridflow(tmp_path, "run", "tiny.toml", *wrong)
    assert said.returncode == 1
    assert "actor.layout.tp: is 2" in said.stderr and "set backend.stage to 2 or 3" in said.stderr
    said = hybridflow(
        tmp_path,
        "run",
        "tiny.toml",
        *RAY,
        "actor.backend.name=megatron",
        "actor.backend.virtual_stages=2",
    )
    assert said.returncode == 1 and "needs pp > 1" in said.stderr
