"""Predicted times beside those that a run took."""

from __future__ import annotations

import json

import attrs
import pytest
from helpers.jobs import job_of

from hybridflow.core.contracts.planner import NotPlanned, Prediction
from hybridflow.settle.placement import planner_of
from hybridflow.settle.predictions import Comparison, predicted

OTHERS = {("ref", "infer"): 0.5, ("reward", "infer"): 1.0}
WORK = {("actor", "generate"): 3.0, ("actor", "train"): 4.0, **OTHERS}


def measured(step: float, **calls: float) -> dict[str, float]:
    """The metrics of a step; calls by role_method."""
    spent = {f"seconds/{name.replace('_', '/', 1)}": value for name, value in calls.items()}
    return {"seconds/step": step, "kl": 0.1, **spent}


def test_medians_after_the_first_step_are_compared_role_by_role():
    comparison = Comparison(Prediction(10.0, WORK))
    comparison.step(measured(99.0, actor_generate=50.0, actor_update=49.0))  # warms up
    ref = {"ref_logprobs": 0.25}
    comparison.step(measured(8.0, actor_generate=2.0, actor_update=4.0, actor_logprobs=1.0, **ref))
    comparison.step(measured(20.0, actor_generate=4.0, actor_update=3.0, tasks_draw=7.0, **ref))
    comparison.step(measured(7.0, actor_episodes=1.0, actor_update=5.0, **ref))
    assert comparison.ended() == [
        "a step took 8.00 s (median), 10.0 s were predicted (+25%)",
        "  actor generation: 2.00 s, predicted 3.00 s (+50%)",
        "  actor training: 4.00 s, predicted 4.00 s (+0%)",
        "  ref inference: 0.25 s, predicted 0.50 s (+100%)",
    ]  # the reward was not measured: no line


def test_a_step_has_the_predictions_of_the_calls_that_it_made():
    comparison = Comparison(Prediction(10.0, {**WORK, ("critic", "infer"): 2.0}))
    calls = {"actor_episodes": 2.0, "actor_update": 4.0, "ref_logprobs": 0.25}
    both = {"critic_values": 1.0, "critic_loss": 1.0}  # which of the two were meant is not known
    assert comparison.step(measured(8.0, **calls, **both)) == {
        "seconds/predicted": 10.0,
        "predicted/actor/episodes": 3.0,
        "predicted/actor/update": 4.0,
        "predicted/ref/logprobs": 0.5,
    }


def test_before_a_second_step_there_is_nothing_to_say():
    comparison = Comparison(Prediction(10.0, WORK))
    assert comparison.ended() == []
    assert comparison.step(measured(8.0)) == {"seconds/predicted": 10.0}
    assert comparison.ended() == []


def test_a_job_that_names_no_cluster_is_not_predicted(tmp_path):
    assert predicted(job_of(tmp_path)) is None


def test_a_job_on_a_named_cluster_is_predicted_by_its_planner(tmp_path):
    job = job_of(tmp_path, placement={"cluster": "a100-80gb:1x1"})
    found = predicted(job)
    assert found is not None
    expected = planner_of(job).predict(job, "a100-80gb:1x1")
    assert found.prediction.seconds == expected.seconds > 0
    assert ("actor", "generate") in found.prediction.work


def test_what_cannot_be_planned_is_no_failure_of_the_run(tmp_path):
    gpt2 = {"model_type": "gpt2", "vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(gpt2))
    (folder / "model.safetensors").touch()
    actor = {"model": {"path": str(folder)}}
    unknown = job_of(tmp_path, placement={"cluster": "a100-80gb:1x1"}, actor=actor)
    with pytest.raises(NotPlanned):
        planner_of(unknown).predict(unknown, "a100-80gb:1x1")
    elsewhere = job_of(tmp_path, placement={"cluster": "no-such-device:1x1"})
    for wrong in (unknown, elsewhere, attrs.evolve(unknown, planner="")):
        assert predicted(wrong) is None
