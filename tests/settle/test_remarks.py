"""What is legal in a configuration, and hardly meant."""

from __future__ import annotations

import pytest
from helpers.job_texts import STAGES
from helpers.jobs import job, jobs

from hybridflow.settle.remarks import remarks

KEPT_NOTHING = ("run.export=false", "run.final_checkpoint=false")


def of(*overrides: str) -> str:
    return "\n".join(remarks(job(*overrides)))


def test_a_usual_job_has_none():
    assert of() == ""


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["run.restarts=1", "run.checkpoint_minutes=0"], "run.restarts: without checkpoints"),
        (["run.checkpoint_every=160"], "run.checkpoint_every: is 160 and the run has 100 steps"),
        (["sampling.temperature=0.0"], "0 is greedy"),
        (["actor.optimizer={schedule='cosine', total_steps=10}"], "total_steps: is 10"),
        (["actor.optimizer={schedule='constant', warmup_steps=900}"], "warmup_steps: is 900"),
        (KEPT_NOTHING, "nothing of the trained model will be kept"),
        ([*KEPT_NOTHING, "run.checkpoint_every=160"], "nothing of the trained model will be kept"),
        # 4 prompts of 4 responses each
        (["algorithm.mini_batch_size=12"], "the last one has 4"),
    ],
)
def test_what_is_hardly_meant_is_remarked(overrides, words):
    assert words in of(*overrides)


AHEAD = (
    "run.max_staleness=1",
    "pools={main=[1], engines=[1]}",
    "actor.generation.pool=engines",
    "algorithm.correction=truncate",
)


def test_what_keeps_steps_from_overlapping_is_remarked():
    assert "runtime inline makes one call after the other" in of("runtime=inline", *AHEAD)
    assert of("runtime=ray", *AHEAD) == ""
    # Engines that take turns with the training need no calls at the same time.
    assert of("runtime=inline", "run.max_staleness=2", "algorithm.correction=truncate") == ""
    adaptive = "runtime=ray", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"
    assert "itself reads the result of ctx.compute, " in of(*adaptive, *AHEAD)
    # DAPO reads scores: beside the engines they are there before the turn, beside the trainer not.
    dapo = "runtime=ray", "algorithm.name=dapo", *AHEAD
    assert of(*dapo) == ""
    assert "itself reads the result of ctx.reward.score, " in of(*dapo, "reward.pool=main")


@pytest.mark.parametrize("kept", ["run.export=true", "run.checkpoint_every=20"])
def test_one_way_to_keep_the_model_is_enough(kept):
    assert of(*KEPT_NOTHING, kept) == ""


def test_a_loss_by_which_no_engine_can_be_checked_is_told(monkeypatch):
    made = job()
    loss = made.algorithm.losses()["actor"]
    loss.needs = ["topk_logprobs"]
    monkeypatch.setattr(type(made.algorithm), "losses", lambda self: {"actor": loss})
    [said] = remarks(made)
    assert said.startswith("actor: its loss needs no logprobs") and "run.mismatch_stop" in said


def test_a_stage_is_remarked_on_by_itself():
    first, second = jobs(
        "stages.first.run.restarts=1", "stages.first.run.checkpoint_minutes=0", text=STAGES
    )
    assert "run.restarts" in "\n".join(remarks(first)) and not list(remarks(second))
