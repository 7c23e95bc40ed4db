"""A run that is cut off goes on bit for bit."""

import re

import pytest
from helpers.paths import matrix
from helpers.tiny import hybridflow, learning, ran_here, write
from safetensors.torch import load_file

PPO = {
    'name = "grpo", prompts_per_step = 4, group_size = 4, mini_batch_size = 8': (
        'name = "ppo", prompts_per_step = 16, mini_batch_size = 8, epochs = 2, kl_target = 0.01'
    )
}


def same_weights(a, b):
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)


AHEAD = [
    "pools={main=[1], engines=[1]}",
    "actor.generation.pool=engines",
    "run.max_staleness=1",
    "algorithm.correction=truncate",
]


# 16 rows are scored per step: row 70 is in step 5, and row 86 in step 6. With a step ahead the
# process is killed as step 6 is written, after the checkpoint of step 4.
@pytest.mark.parametrize(
    "more, at",
    [pytest.param([], 70, id="now"), pytest.param(AHEAD, 86, marks=matrix, id="ahead")],
)
def test_a_run_killed_between_checkpoints_resumes_bit_for_bit(tmp_path, more, at):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        write(folder, **PPO)
    settings = ["run.checkpoint_every=2", "run.export=true", *more]
    ran_here(whole, *settings)

    settings.append(f"reward={{function='rewards:kills_itself', options={{at={at}}}}}")  # once
    killed = hybridflow(cut, "run", "tiny.toml", *settings)
    assert killed.returncode == -9
    steps = [row["step"] for row in learning(cut / "runs/tiny")]
    assert steps == [1, 2, 3, 4]
    # It may have been killed while the checkpoint of step 4 was written: the one before stands.
    assert re.search("resuming after step [24]\n", ran_here(cut, *settings, "--resume"))

    assert learning(cut / "runs/tiny") == learning(whole / "runs/tiny")
    for role in ("actor", "critic"):
        assert same_weights(cut / "runs/tiny/export" / role, whole / "runs/tiny/export" / role)


def test_sigterm_writes_a_checkpoint_at_the_end_of_the_step_and_resume_finishes(tmp_path):
    write(tmp_path)
    once = "reward.function=rewards:asks_to_stop"
    stopped = hybridflow(tmp_path, "run", "tiny.toml", once)
    assert stopped.returncode == 99, stopped.stderr
    assert "go on with --resume" in stopped.stdout
    assert [row["step"] for row in learning(tmp_path / "runs/tiny")] == [1, 2, 3]
    said = ran_here(tmp_path, once, "--resume")
    assert "tiny: going on from step 3; changed: nothing" in said
    assert [row["step"] for row in learning(tmp_path / "runs/tiny")] == [1, 2, 3, 4, 5, 6]
