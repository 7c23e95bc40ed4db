"""The loop of a job: steps, validations and checkpoints when they are due; going on bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from helpers.jobs import Kept
from helpers.tiny import learning, write
from safetensors.torch import load_file

from hybridflow.core.controller import RunOutcome, run_job
from hybridflow.core.errors import WorkerDied
from hybridflow.core.plugins import Registry, hookimpl
from hybridflow.core.running.session import prepare
from hybridflow.settle.launch import load_config

ALGORITHM = '''
from pathlib import Path

from hybridflow.algorithms.grpo import GRPO
from hybridflow.core.errors import WorkerDied


class LosesAWorker(GRPO):
    """In its third step, as often as the file says."""

    Config = GRPO.Config
    steps = 0

    def step(self, ctx):
        super().step(ctx)
        self.steps += 1
        left = int(Path("deaths").read_text())
        if ctx.step == 3 and left:
            Path("deaths").write_text(str(left - 1))
            raise WorkerDied("it was killed", role="actor", phase="update", rank=0)

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state.pop("steps")
        super().load_state_dict(state)
'''
SIZES = ("algorithm.prompts_per_step=2", "algorithm.group_size=2", "algorithm.mini_batch_size=2")
SMALL = ("run.device=cpu", "reward=exact_match", *SIZES)
HELD_OUT = ("validation.data.limit=2", "validation.every=2")


class Watcher:
    """Remembers what it was told, and may act on it."""

    def __init__(self, at_step=lambda step: None):
        self.told, self.at_step = [], at_step

    @hookimpl
    def hybridflow_step_end(self, run, step, metrics):
        self.told.append(("step", step, "actor/loss" in metrics))
        self.at_step(step)

    @hookimpl
    def hybridflow_checkpoint(self, step, folder):
        self.told.append(("checkpoint", step, (folder / "state.json").is_file()))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with the config and the rewards, from which they are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path)
    return tmp_path


@pytest.fixture
def observed(monkeypatch):
    """`observed(plugin)`: the loop tells it."""

    def observe(plugin):
        ours = Registry().load()
        ours.register(plugin)
        for module in ("controller", "running.saving"):
            monkeypatch.setattr(f"hybridflow.core.{module}.registry", lambda: ours)
        return plugin

    return observe


def go(*overrides: str, resume=False, overwrite=False, export=False, observers=()) -> RunOutcome:
    [job] = load_config("tiny.toml", [*SMALL, *overrides])
    return run_job(job, prepare(job), resume, overwrite, export, None, observers)


def plain(samples: dict) -> dict:
    """Recorded rows with lists in the place of arrays."""
    return {
        step: [
            {
                name: getattr(value, "tolist", lambda value=value: value)()
                for name, value in row.items()
            }
            for row in rows
        ]
        for step, rows in samples.items()
    }


def test_a_run_takes_its_steps_and_tells_who_watches(here, observed):
    watcher = observed(Watcher())
    outcome = go("run.steps=3", "run.checkpoint_every=2", *HELD_OUT)
    assert (outcome.state, outcome.step) == ("finished", 3)
    assert sorted(outcome.validations) == [2, 3]  # when it is due, and at the end
    assert all("validation/score" in found for found in outcome.validations.values())
    assert watcher.told == [
        ("step", 1, True),
        ("step", 2, True),
        ("step", 3, True),
        ("checkpoint", 2, True),  # which was written beside step 3
        ("checkpoint", 3, True),
    ]
    assert not Path("runs/tiny/export").exists()


def test_a_run_that_was_cut_off_goes_on_bit_for_bit(here):
    whole, cut = Kept(), Kept()
    go("run.steps=3", "run.name=whole", export=True, observers=[whole])
    begun = ("run.steps=2", "run.name=cut", "run.checkpoint_every=2")
    assert go(*begun, observers=[cut]).step == 2
    goes_on = {"resume": True, "export": True, "observers": [cut]}
    assert go("run.steps=3", "run.name=cut", **goes_on).step == 3
    assert learning(here / "runs/cut") == learning(here / "runs/whole")
    # A group a step, the same to the last bit
    assert [len(rows) for rows in whole.samples_of.values()] == [2, 2, 2]
    assert plain(cut.samples_of) == plain(whole.samples_of)
    weights = "export/actor/model.safetensors"
    whole, cut = (load_file(f"runs/{name}/{weights}") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(whole[name].equal(cut[name]) for name in whole)


def test_a_checkpoint_knows_the_validation_of_its_step(here):
    first = go("run.steps=2", "run.checkpoint_every=2", *HELD_OUT)
    state = json.loads(Path("runs/tiny/checkpoints/step-00000002/state.json").read_text())
    assert state["step"] == 2 and state["validations"] == {"2": first.validations[2]}
    again = go("run.steps=2", *HELD_OUT, resume=True)
    assert again.validations == first.validations
    logged = [row["step"] for row in learning(here / "runs/tiny")]
    assert logged == [1, 2, 2]  # step 2 and its validation, once each


def test_a_run_that_is_told_to_stop_ends_with_a_checkpoint(here, observed, capsys):
    before = signal.signal(signal.SIGTERM, lambda *signal: pytest.fail("nobody listened"))
    try:
        observed(Watcher(at_step=lambda step: step == 2 and signal.raise_signal(signal.SIGTERM)))
        outcome = go("run.steps=4")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (outcome.state, outcome.step) == ("stopped", 2)
    assert [folder.name for folder in Path("runs/tiny/checkpoints").iterdir()] == ["step-00000002"]
    assert "the checkpoint of step 2 is written; go on with --resume" in capsys.readouterr().out


def test_a_run_restarts_from_its_checkpoint_as_often_as_it_may(here, capsys):
    Path("loses_a_worker.py").write_text(ALGORITHM)
    mine = "algorithm.name=loses_a_worker:LosesAWorker"
    settings = (mine, "run.checkpoint_every=2", "run.steps=3")
    Path("deaths").write_text("2")
    with pytest.raises(WorkerDied, match="it was killed"):
        go(*settings, "run.restarts=1", "run.name=once")
    Path("deaths").write_text("1")
    assert go(*settings, "run.restarts=1", "run.checkpoint_every=1").step == 3
    said = capsys.readouterr().out
    assert said.count("restart 1 of 1, from the newest checkpoint") == 2
    state = json.loads(Path("runs/tiny/checkpoints/step-00000003/state.json").read_text())
    assert state["algorithm"]["steps"] == 3  # the step that failed is not counted twice


def test_a_run_that_was_told_to_stop_is_not_started_again_when_a_worker_dies(here, monkeypatch):
    """SIGTERM arrives in the step that loses the worker."""
    Path("is_told_and_loses.py").write_text(
        ALGORITHM.replace(
            "raise WorkerDied", "signal.raise_signal(signal.SIGTERM)\n            raise WorkerDied"
        ).replace("from ", "import signal\n\nfrom ", 1)
    )
    Path("deaths").write_text("1")
    before = signal.signal(signal.SIGTERM, lambda *signal: pytest.fail("nobody listened"))
    try:
        mine = "algorithm.name=is_told_and_loses:LosesAWorker"
        outcome = go(mine, "run.steps=4", "run.checkpoint_every=1", "run.restarts=1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outcome.state == "stopped" and Path("deaths").read_text() == "0"
    steps = [folder.name for folder in sorted(Path("runs/tiny/checkpoints").glob("step-*"))]
    assert steps and outcome.step == int(steps[-1].removeprefix("step-"))
