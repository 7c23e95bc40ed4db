"""Checkpoints are complete or not there, and the newest few are kept."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest

from hybridflow.core.errors import CheckpointError, DamagedError
from hybridflow.core.running.checkpoint import (
    FORMAT,
    WITH_AHEAD,
    Ahead,
    Best,
    Checkpoints,
    State,
)
from hybridflow.core.values.sealed import read_sealed, write_sealed


def state(step: int, **fields) -> State:
    made = {"algorithm": {}, "counters": {}, "data": {}, "validations": {}, "tokens": 0}
    return State(step, **{**made, **fields})


def saving(text: str):
    def save(folder: Path) -> None:
        (folder / "model").write_text(text)

    return save


def write(checkpoints: Checkpoints, made: State, save) -> Path:
    """Write a checkpoint as a run does; `save` returns what it wrote of later steps."""
    partial = checkpoints.begin(made.step)
    checkpoints.complete(attrs.evolve(made, ahead=save(partial)), partial)
    return checkpoints.path(made.step)


def test_what_was_written_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.steps() == []
    written = state(7, counters={"samples": 3}, validations={0: {"validation/score": 0.5}})
    folder = write(checkpoints, written, saving("weights"))
    assert folder == checkpoints.path(7) and (folder / "model").read_text() == "weights"
    assert checkpoints.steps() == [7]
    assert checkpoints.read(7) == written


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_what_is_generated_ahead_is_part_of_the_state(checkpoints):
    ahead = Ahead(1, {"actor": [[2, 4], [3, 6]]}, ["abc", ""], {"actor": "def"})
    folder = write(checkpoints, state(3), lambda folder: ahead)
    assert checkpoints.read(3) == state(3, ahead=ahead)
    # A version before does not read it, and reads those without.
    assert read_sealed(folder / "state.json")["format"] == WITH_AHEAD
    plain = read_sealed(write(checkpoints, state(4), saving("weights")) / "state.json")
    assert plain["format"] == FORMAT and "ahead" not in plain
    assert Ahead.file(folder, 1) == f"{folder}/ahead-1.npz"
    assert Ahead.file(folder, "actor") == f"{folder}/carried-actor.npz"


def test_the_newest_are_kept_in_the_order_of_steps(checkpoints):
    for step in (8, 9, 10, 100):
        write(checkpoints, state(step), saving(str(step)))
    assert checkpoints.steps() == [10, 100]
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-00000010", "step-00000100"]


def test_the_same_step_again_takes_the_place_of_the_first(checkpoints):
    write(checkpoints, state(3, tokens=1), saving("first"))
    write(checkpoints, state(3, tokens=2), saving("second"))
    assert checkpoints.read(3).tokens == 2
    assert (checkpoints.path(3) / "model").read_text() == "second"


def test_the_best_are_kept_beside_the_newest_of_equal_ones_the_earliest(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1, Best(2, "validation/score", highest=True))
    scores = {1: 0.2, 2: 0.7, 3: 0.5, 4: 0.7, 5: math.nan, 6: 0.6}
    validations: dict = {0: {"validation/score": 0.9}}  # of no step, so that none is kept for it
    kept = []
    for step, score in scores.items():
        validations[step] = {"validation/score": score}
        write(checkpoints, state(step, validations=dict(validations)), saving("x"))
        kept.append(checkpoints.steps())
    assert kept == [[1], [1, 2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 6]]
    lowest = Best(2, "validation/loss", highest=False)
    losses = {1: {"validation/loss": 0.5}, 2: {}, 3: {"validation/loss": 0.1}, 4: {"other": 0.0}}
    assert lowest.steps(losses) == [3, 1]
    assert Best(0, "validation/score", True).steps(validations) == []


def test_one_that_fails_is_told_with_what_stands_and_nothing_is_left_of_it(checkpoints):
    full = OSError("no space left on device")
    checkpoints.begin(1)
    said = str(checkpoints.failure(1, full))
    assert "step 1 could not be written" in said and "no space left on device; there is no" in said
    write(checkpoints, state(2), saving("whole"))
    saving("half")(checkpoints.begin(3))
    assert "the checkpoint of step 2 is complete" in str(checkpoints.failure(3, full))
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(checkpoints, state(2, algorithm={"state": object()}), saving("other"))
    checkpoints.failure(2, full)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000002"]
    assert checkpoints.read(2) == state(2)
    assert (checkpoints.path(2) / "model").read_text() == "whole"


def test_what_a_killed_process_left_is_no_checkpoint(checkpoints):
    write(checkpoints, state(4), saving("whole"))
    (checkpoints.folder / "partial-step-00000005").mkdir()
    (checkpoints.folder / "partial-step-00000005" / "state.json").write_text("{}")
    checkpoints.path(6).mkdir()  # without its state
    (checkpoints.folder / "step-best").mkdir()
    (checkpoints.folder / "step-best" / "state.json").write_text("{}")
    assert checkpoints.steps() == [4]
    write(checkpoints, state(5), saving("again"))
    assert checkpoints.steps() == [4, 5]
    assert not (checkpoints.folder / "partial-step-00000005").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99}, r"written by another hybridflow \(format 99, .*--overwrite"),
        ({"format": None}, f"format None, this one reads {FORMAT}"),
        ({"step": 2}, "has the state of step 2"),
        ({"validations": [1]}, "is not the state of a run"),
        ({"validations": {"first": {}}}, "is not the state of a run"),
        ({"more": 1}, "is not the state of a run"),
    ],
)
def test_one_of_another_format_or_another_content_is_refused(checkpoints, change, said):
    write(checkpoints, state(1), saving("whole"))
    file = checkpoints.path(1) / "state.json"
    write_sealed(file, read_sealed(file) | change)
    with pytest.raises(CheckpointError, match=said):
        checkpoints.read(1)


def test_one_that_is_cut_off_or_gone_is_damaged(checkpoints):
    write(checkpoints, state(1), saving("whole"))
    (checkpoints.path(1) / "state.json").write_text("{")
    for step in (1, 9):
        with pytest.raises(DamagedError, match=f"step-0000000{step}/state.json cannot be read"):
            checkpoints.read(step)


def test_one_that_is_set_aside_is_no_longer_listed(checkpoints):
    for again in range(2):
        write(checkpoints, state(1), saving("whole"))
        write(checkpoints, state(2), saving(f"damaged {again}"))
        aside = checkpoints.set_aside(2)
        assert aside == checkpoints.folder / "damaged-step-00000002"
        assert (aside / "model").read_text() == f"damaged {again}"
        assert checkpoints.steps() == [1]
