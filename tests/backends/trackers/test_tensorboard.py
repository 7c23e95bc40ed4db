"""TensorBoard's event files, as TensorBoard itself reads them."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorboard")

from helpers.recorded import row_of

from hybridflow.backends.trackers.config import TensorBoardConfig
from hybridflow.backends.trackers.tensorboard import TensorBoardTracker


def log(folder, after, values):
    """What a run that goes on after a step logs."""
    tracker = TensorBoardTracker(TensorBoardConfig())
    tracker.start(folder, after)
    for step, loss in values.items():
        tracker.log(step, {"actor/loss": loss, "lr": 0.5})
    tracker.close()


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_every_metric_is_a_scalar_at_its_step(tmp_path):
    log(tmp_path, 0, {1: 4.0, 2: 2.0})
    assert scalars(tmp_path, "actor/loss") == [(1, 4.0), (2, 2.0)]
    assert scalars(tmp_path, "lr") == [(1, 0.5), (2, 0.5)]


def test_a_resumed_run_takes_the_place_of_the_later_steps(tmp_path):
    log(tmp_path, 0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    log(tmp_path, 2, {3: 30.0})
    assert scalars(tmp_path, "actor/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_run_that_starts_again_before_its_first_checkpoint_leaves_nothing_of_the_old(tmp_path):
    log(tmp_path, 0, {1: 1.0, 2: 2.0})
    log(tmp_path, 0, {1: 10.0})
    assert scalars(tmp_path, "actor/loss") == [(1, 10.0)]


def texts(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events.Tensors(f"{name}/text_summary")
    ]


def test_samples_are_tables_of_some_steps(tmp_path):
    tracker = TensorBoardTracker(TensorBoardConfig(samples_every=2))
    tracker.start(tmp_path, 0)
    for step in (1, 2, 3):
        rows = [row_of(step, at, response=f"a|b\nc{at}", scores=0.25) for at in range(2)]
        tracker.samples(step, rows)
    tracker.close()
    found = texts(tmp_path, "samples/train")
    assert [step for step, _ in found] == [1, 2]
    head, line, first, second = found[1][1].splitlines()
    assert head == "| step | data | group | prompt | response | scores | outcome |"
    assert set(line) == set("| -") and second.count(" | ") == 6
    assert first == "| 2 | train | 200 | p4 | a\\|b<br>c0 | 0.25 | complete |"
