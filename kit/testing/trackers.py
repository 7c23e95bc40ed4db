"""TrackerConformance: what is logged is there, a resumed run goes on after its step, and closing is safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hybridflow.core.contracts.tracker import Tracker
from hybridflow.kit.testing.checks import missing_fixture, require

STEPS = {
    1: {"reward": 0.5, "actor/loss": -1.25},
    2: {"reward": 0.75},
    3: {"reward": 1.0, "seconds/step": 0.001},
}


class TrackerConformance:
    """Give a fixture `make`: a function () -> your tracker with its settings; override `logged` where it can be read."""

    @pytest.fixture
    def make(self) -> Callable[[], Tracker]:
        return missing_fixture(self, "make", "a function () -> your tracker")

    def logged(self, folder: Path) -> Mapping[tuple[int, str], float] | None:
        """(step, metric) -> value of all that was logged in a run's folder; None where it goes elsewhere."""
        return None

    def keeps(self, metric: str) -> bool:
        """Whether your tracker, with the settings of `make`, writes this metric; override where it is not all of them."""
        return True

    def _log(self, tracker: Tracker, folder: Path, after: int, steps: range) -> None:
        tracker.start(folder, after)
        for step in steps:
            tracker.log(step, STEPS[step])
        tracker.close()

    def _require(self, folder: Path, steps: range, likely: str) -> None:
        found = self.logged(folder)
        if found is None:
            pytest.skip("logged() is not overridden")
        expected = {
            (step, name): value
            for step in steps
            for name, value in STEPS[step].items()
            if self.keeps(name)
        }
        close = set(found) == set(expected) and all(
            abs(found[key] - expected[key]) < 1e-6 for key in expected
        )
        require(close, got=f"{dict(found)}", expected=f"{expected}", likely=likely)

    def test_what_is_logged_is_there(self, make, tmp_path):
        self._log(make(), tmp_path, 0, range(1, 4))
        self._require(
            tmp_path, range(1, 4), "a metric is dropped, or what was written is not flushed"
        )

    def test_a_resumed_run_goes_on_after_its_step(self, make, tmp_path):
        self._log(make(), tmp_path, 0, range(1, 4))
        self._log(make(), tmp_path, 1, range(2, 3))
        self._require(
            tmp_path,
            range(1, 3),
            "start(folder, step) must drop what was logged of later steps, and keep the rest",
        )

    def test_a_run_without_steps_leaves_nothing_broken(self, make, tmp_path):
        self._log(make(), tmp_path, 0, range(1, 1))
        self._log(make(), tmp_path, 0, range(1, 3))
        self._require(tmp_path, range(1, 3), "an empty file of an earlier run is not read")

    def test_two_runs_do_not_meet(self, make, tmp_path):
        one, other = tmp_path / "one", tmp_path / "other"
        one.mkdir()
        other.mkdir()
        self._log(make(), one, 0, range(1, 2))
        self._log(make(), other, 0, range(1, 4))
        self._require(one, range(1, 2), "a file outside of the folder that start was given")
