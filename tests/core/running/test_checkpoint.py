"""Checkpoints are complete or not there, and the newest few are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.core.errors import CheckpointError, WorkerDied
from hybridflow.core.running.checkpoint import Checkpoints


def saving(text: str):
    def save(folder: Path) -> None:
        (folder / "model").write_text(text)

    return save


def failing(folder: Path) -> None:
    (folder / "model").write_text("half of it")
    raise OSError("no space left on device")


def test_what_was_written_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.steps() == []
    folder = checkpoints.write(7, {"step": 7, "counters": {"samples": 3}}, saving("weights"))
    assert folder == checkpoints.path(7) and (folder / "model").read_text() == "weights"
    assert checkpoints.steps() == [7]
    state = checkpoints.read(7)
    assert (state["step"], state["counters"]) == (7, {"samples": 3})


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_the_newest_are_kept_in_the_order_of_steps(checkpoints):
    for step in (8, 9, 10, 100):
        checkpoints.write(step, {"step": step}, saving(str(step)))
    assert checkpoints.steps() == [10, 100]
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["step-00000010", "step-00000100"]


def test_the_same_step_again_takes_the_place_of_the_first(checkpoints):
    checkpoints.write(3, {"try": 1}, saving("first"))
    checkpoints.write(3, {"try": 2}, saving("second"))
    assert checkpoints.read(3)["try"] == 2
    assert (checkpoints.path(3) / "model").read_text() == "second"


def test_one_that_fails_leaves_the_others_whole_and_nothing_of_itself(checkpoints):
    full = "no space left on device"
    with pytest.raises(CheckpointError, match=rf"step 1 could.*{full}; there is no earlier one"):
        checkpoints.write(1, {}, failing)
    checkpoints.write(2, {"step": 2}, saving("whole"))
    with pytest.raises(CheckpointError, match=r"step 3 could.*the checkpoint of step 2 is whole"):
        checkpoints.write(3, {}, failing)
    with pytest.raises(CheckpointError, match=r"step 2 could not.*not JSON serializable"):
        checkpoints.write(2, {"state": object()}, saving("other"))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000002"]
    assert checkpoints.read(2)["step"] == 2
    assert (checkpoints.path(2) / "model").read_text() == "whole"


def test_a_worker_that_dies_while_it_writes_is_no_full_disk(checkpoints):
    # WorkerDied starts the job again; any other error would end it.
    def dying(folder):
        (folder / "model").write_text("half")
        raise WorkerDied("rank 1 is gone", role="actor", phase="save", rank=1)

    checkpoints.write(2, {"step": 2}, saving("whole"))
    with pytest.raises(WorkerDied, match="rank 1 is gone"):
        checkpoints.write(3, {}, dying)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000002"]


def test_what_a_killed_process_left_is_no_checkpoint(checkpoints):
    checkpoints.write(4, {"step": 4}, saving("whole"))
    (checkpoints.folder / "partial-step-00000005").mkdir()
    (checkpoints.folder / "partial-step-00000005" / "state.json").write_text("{}")
    checkpoints.path(6).mkdir()  # without its state
    (checkpoints.folder / "step-best").mkdir()
    (checkpoints.folder / "step-best" / "state.json").write_text("{}")
    assert checkpoints.steps() == [4]
    checkpoints.write(5, {"step": 5}, saving("again"))
    assert checkpoints.steps() == [4, 5]
    assert not (checkpoints.folder / "partial-step-00000005").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        (json.dumps({"step": 1}), r"written by an older hybridflow \(format None, this one reads"),
        (json.dumps([1]), "written by an older hybridflow"),
        (json.dumps({"format": 99}), r"written by another hybridflow \(format 99, .*--overwrite"),
    ],
)
def test_one_that_is_of_another_format_or_cut_off_is_refused(checkpoints, text, said):
    checkpoints.write(1, {}, saving("whole"))
    (checkpoints.path(1) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        checkpoints.read(1)


def test_one_that_is_not_there_is_named(checkpoints):
    with pytest.raises(CheckpointError, match="step-00000009 cannot be read"):
        checkpoints.read(9)
