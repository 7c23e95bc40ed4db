"""TrackerConformance: what is logged can be read, and a resumed run goes on after its step."""

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
"""Step -> the metrics that the tests log."""


class TrackerConformance:
    """Subclass it and give a fixture `make`: a function () -> your tracker with its settings.

    Override `logged` where a run's figures can be read back.
    """

    @pytest.fixture
    def make(self) -> Callable[[], Tracker]:
        """The author's function () -> a new tracker."""
        return missing_fixture(self, "make", "a function () -> your tracker")

    def logged(self, folder: Path) -> Mapping[tuple[int, str], float] | None:
        """Return (step, metric) -> value of all that was logged in a run's folder.

        None says that it goes elsewhere; the tests are skipped then.
        """
        return None

    def keeps(self, metric: str) -> bool:
        """Return whether your tracker, with the settings of `make`, writes this metric.

        Override it where that is not true of all metrics.
        """
        return True

    def _log(self, tracker: Tracker, folder: Path, after: int, steps: range) -> None:
        """Log these steps in a run that goes on after step `after`."""
        tracker.start(folder, after)
        for step in steps:
            tracker.log(step, STEPS[step])
        tracker.close()

    def _require(self, folder: Path, steps: range, likely: str) -> None:
        """Require that a run's folder has the metrics of these steps, up to 1e-6, and no others."""
        logged = self.logged(folder)
        if logged is None:
            pytest.skip("logged() is not overridden")

        expected = {}
        for step in steps:
            for name, value in STEPS[step].items():
                if self.keeps(name):
                    expected[step, name] = value

        # Values may have lost digits on their way through a file.
        same = set(logged) == set(expected)
        close = same and all(abs(logged[key] - expected[key]) < 1e-6 for key in expected)
        require(close, got=f"{dict(logged)}", expected=f"{expected}", likely=likely)

    def test_what_is_logged_is_there(self, make, tmp_path):
        """Three steps are logged in one run."""
        self._log(make(), tmp_path, 0, range(1, 4))
        self._require(
            tmp_path, range(1, 4), "a metric is dropped, or what was written is not flushed"
        )

    def test_a_resumed_run_goes_on_after_its_step(self, make, tmp_path):
        """A run is resumed after step 1: steps 2 and 3 of the first attempt are gone."""
        self._log(make(), tmp_path, 0, range(1, 4))
        # The second attempt ends after step 2.
        self._log(make(), tmp_path, 1, range(2, 3))
        self._require(
            tmp_path,
            range(1, 3),
            "start(folder, step) must drop what was logged of later steps, and keep the rest",
        )

    def test_a_run_without_steps_leaves_nothing_broken(self, make, tmp_path):
        """A run that ended before its first step can be started again."""
        # The first run logs nothing.
        self._log(make(), tmp_path, 0, range(1, 1))
        self._log(make(), tmp_path, 0, range(1, 3))
        self._require(tmp_path, range(1, 3), "an empty file of an earlier run is not read")

    def test_two_runs_do_not_meet(self, make, tmp_path):
        """Runs in two folders each have their own figures."""
        one = tmp_path / "one"
        other = tmp_path / "other"
        one.mkdir()
        other.mkdir()

        # The second run logs more steps, which must not show in the first.
        self._log(make(), one, 0, range(1, 2))
        self._log(make(), other, 0, range(1, 4))
        self._require(one, range(1, 2), "a file outside of the folder that start was given")
