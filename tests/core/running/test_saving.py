"""Checkpoints that are written beside the steps: what they hold, when they are complete, what stops them."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.waiting import eventually

from hybridflow.core.errors import CheckpointError, WorkerDied
from hybridflow.core.running import saving as module
from hybridflow.core.running.checkpoint import Best, State
from hybridflow.core.running.saving import Saving


def state(step: int) -> State:
    return State(step, {}, {}, {}, {}, 0)


@pytest.fixture
def saving(run_of):
    return Saving(run_of())


@pytest.fixture
def told(monkeypatch):
    """The steps of checkpoints that hooks are told of."""
    steps = []

    class Told:
        def notify(self, hook, run, step, folder):
            assert hook == "hybridflow_checkpoint" and (folder / "state.json").is_file()
            steps.append(step)

    monkeypatch.setattr(module, "registry", Told)
    return steps


def looked(saving: Saving) -> bool:
    """Look as often as steps would; return whether no checkpoint is under way."""
    saving.look()
    return saving._under_way is None


def test_a_checkpoint_has_the_state_of_its_step_and_is_complete_some_steps_later(
    saving, tiny, told
):
    before = tiny.weights("actor")
    saving.begin(state(3), lambda folder: None)
    tiny.step()
    assert saving.run.checkpoints.steps() == [] and told == []
    eventually(lambda: looked(saving))
    assert saving.run.checkpoints.steps() == [3] and told == [3]
    assert saving.run.checkpoints.read(3) == state(3)
    changed = tiny.weights("actor")
    assert any(not torch.equal(changed[name], values) for name, values in before.items())
    tiny.session.load(saving.run.checkpoints.path(3))
    assert all(torch.equal(tiny.weights("actor")[name], before[name]) for name in before)
    saving.look()
    saving.finish()
    assert told == [3]


def test_the_next_one_waits_for_the_one_before_and_the_end_for_the_last(saving, told):
    for step in (1, 2, 3):
        saving.begin(state(step), lambda folder: None)
        assert told == list(range(1, step))
    saving.finish()
    assert told == [1, 2, 3] and saving.run.checkpoints.steps() == [2, 3]
    assert not list(saving.run.checkpoints.folder.glob("partial-*"))


def test_one_that_is_being_completed_is_waited_for_at_the_end(saving, told):
    saving.begin(state(1), lambda folder: None)

    def completing() -> bool:
        saving.look()
        return saving._under_way is None or saving._under_way.thread is not None

    eventually(completing)
    saving.finish()
    assert told == [1]


def refuses(*_, **others):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("where", ["begin", "keep", "save", "saved", "complete"])
def test_one_that_cannot_be_written_says_what_stands_and_leaves_nothing(
    saving, monkeypatch, where, wait
):
    saving.begin(state(1), lambda folder: None)
    saving.finish()
    monkeypatch.setattr(type(saving.run.checkpoints), where, refuses, raising=False)
    if where in ("save", "saved"):
        monkeypatch.setattr(saving.run.session, where, refuses if where == "save" else late)
    said = r"step 2 could not be written to .*No space left.*the checkpoint of step 1 is complete"
    with pytest.raises(CheckpointError, match=said):
        saving.begin(state(2), refuses if where == "keep" else lambda folder: None)
        if wait:
            saving.finish()
        eventually(lambda: looked(saving))
    assert saving.run.checkpoints.steps() == [1]
    monkeypatch.undo()
    assert not list(saving.run.checkpoints.folder.glob("partial-*"))
    saving.begin(state(3), lambda folder: None)  # as the state of a run after that is as before
    saving.finish()
    assert saving.run.checkpoints.steps() == [1, 3]


def late(wait):
    return refuses


@pytest.mark.parametrize("where", ["save", "saved"])
def test_a_worker_that_dies_while_it_writes_is_no_full_disk(saving, monkeypatch, where):
    """WorkerDied starts the job again; any other error would end it."""

    def dies(*_, **others):
        raise WorkerDied("rank 1 is gone", role="actor", phase=where, rank=1)

    monkeypatch.setattr(saving.run.session, where, dies if where == "save" else lambda wait: dies)
    with pytest.raises(WorkerDied, match="rank 1 is gone"):
        saving.begin(state(1), lambda folder: None)
        saving.finish()
    assert saving.run.checkpoints.steps() == []


def test_they_are_due_by_steps_by_time_and_with_the_best_validations(saving, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def due(**settings) -> list[int]:
        run = saving.run
        run.job = attrs.evolve(run.job, run=attrs.evolve(run.job.run, **settings))
        made = Saving(run)
        steps = []
        for step in range(1, 9):
            now[0] += 25.0
            if made.due(step):
                steps.append(step)
                made.begin(state(step), lambda folder: None)
        made.finish()
        return steps

    assert due(checkpoint_every=0, checkpoint_minutes=0) == []
    assert due(checkpoint_every=3, checkpoint_minutes=0) == [3, 6]
    assert due(checkpoint_every=0, checkpoint_minutes=1) == [3, 6]
    assert due(checkpoint_every=4, checkpoint_minutes=1) == [3, 4, 7, 8]
    saving.run.checkpoints = attrs.evolve(saving.run.checkpoints, best=Best(1, "score", True))
    saving.run.validations = {
        0: {"score": 0.9},
        2: {"score": 0.1},
        4: {"score": 0.3},
        6: {"score": 0.3},
    }
    # Validations come with the steps.
    every = dict(saving.run.validations)
    steps = []
    for step in range(1, 7):
        saving.run.validations = {at: one for at, one in every.items() if at <= step}
        if Saving(saving.run).due(step):
            steps.append(step)
    assert due(checkpoint_every=0, checkpoint_minutes=0) and steps == [2, 4]
