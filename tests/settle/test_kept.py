"""What a finished run leaves, as its folder says it."""

from __future__ import annotations

import json

import attrs
import pytest
from helpers.jobs import job_of

from hybridflow.core.job.sections import ValidationSection
from hybridflow.core.running.checkpoint import checkpoints_of
from hybridflow.settle.kept import (
    Done,
    kept,
    read_done,
    results_of,
    to_export,
    to_train,
    write_done,
)

SCORES = {2: {"validation/score": 0.5}}


@pytest.fixture
def job(tmp_path):
    """A job of six steps in an empty folder."""
    return attrs.evolve(job_of(tmp_path, run={"steps": 6}), folder=tmp_path)


def export(job):
    folder = job.folder / "export" / "actor"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def checkpoint(job, step):
    folder = job.folder / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


def test_how_a_run_ended_is_read_as_it_was_written(job):
    assert read_done(job) is None
    write_done(job, Done(6, SCORES, exported=True))
    assert read_done(job) == Done(6, SCORES, exported=True)
    assert json.loads((job.folder / "done.json").read_text())["step"] == 6


def test_there_is_something_to_train_below_the_steps_and_the_goal(job):
    assert to_train(job, Done(5, SCORES, True))
    assert not to_train(job, Done(6, SCORES, True))
    goal = attrs.evolve(job, validation=attrs.evolve(job.validation, stop_at=0.5))
    assert not to_train(goal, Done(5, SCORES, True))


def test_there_is_something_to_export_where_it_was_not_or_is_gone(job):
    assert to_export(job, Done(6, {}, exported=True), True)  # nothing is there
    export(job)
    assert not to_export(job, Done(6, {}, exported=True), True)
    assert to_export(job, Done(6, {}, exported=False), True)  # cut off while it was written
    assert not to_export(job, Done(6, {}, exported=False), False)


def test_results_are_what_a_new_beginning_would_replace(job):
    for name in ("run.json", ".lock"):
        (job.folder / name).write_text("")
    for folder in ("logs", "journal"):
        (job.folder / folder).mkdir()
    checkpoint(job, 2)
    assert results_of(job) == [] and checkpoints_of(job).steps() == [2]
    (job.folder / "metrics.jsonl").write_text("")
    assert results_of(job) == ["metrics.jsonl"]
    assert results_of(attrs.evolve(job, folder=job.folder / "none")) == []


def test_a_line_says_where_the_model_is_and_what_can_go_on(job):
    assert kept(job).startswith("nothing of the model is kept")
    checkpoint(job, 6)
    assert "--resume run.export=true writes that of step 6 " in kept(job)
    export(job)
    where = f"the model is in {job.folder}/export/actor"
    assert kept(job) == f"{where}; --resume with more run.steps goes on from step 6"
    goal = attrs.evolve(job, validation=ValidationSection(stop_at=0.5))
    for score, more in ((0.4, "more run.steps"), (0.6, "a higher validation.stop_at")):
        write_done(goal, Done(6, {6: {"validation/score": score}}, True))
        assert kept(goal) == f"{where}; --resume with {more} goes on from step 6"
    (job.folder / "checkpoints/step-00000006/state.json").unlink()
    assert kept(job) == f"{where}; there is no checkpoint to go on from"
