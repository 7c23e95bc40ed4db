"""Every invariant of TrackerConformance notices the fault that it is for."""

from __future__ import annotations

import pytest
from helpers.expect import caught, each_fault, each_invariant

from hybridflow.core.contracts.tracker import Tracker
from hybridflow.kit.testing.trackers import TrackerConformance


class Lines(Tracker):
    """A line "step name value" for each metric."""

    file_name = "lines.txt"

    def start(self, folder, step):
        self.path = folder / self.file_name
        self.lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.lines = [line for line in self.lines if self.keeps(int(line.split()[0]), step)]

    def keeps(self, of, step):
        return of <= step

    def log(self, step, metrics):
        self.lines += [f"{step} {name} {value}" for name, value in metrics.items()]

    def close(self):
        self.path.write_text("\n".join(self.lines))


class DropsAMetric(Lines):
    def log(self, step, metrics):
        super().log(step, dict(list(metrics.items())[:1]))


class WholeNumbers(Lines):
    def log(self, step, metrics):
        super().log(step, {name: round(value) for name, value in metrics.items()})


class NeverFlushes(Lines):
    def close(self):
        self.path.touch()


class BeginsAnew(Lines):
    def keeps(self, of, step):
        return False


class KeepsLaterSteps(Lines):
    def keeps(self, of, step):
        return True


class MarksItsEnd(Lines):
    """An empty run's file is taken for one that must not be written again."""

    def close(self):
        if not self.path.exists():
            super().close()


class Shared(Lines):
    """All runs that it ever saw are one."""

    seen: list = []

    def close(self):
        self.seen.append(self.path)
        self.path = self.seen[0]
        super().close()


class Kit(TrackerConformance):
    def logged(self, folder):
        lines = (folder / Lines.file_name).read_text().splitlines()
        found = [line.split() for line in lines]
        return {(int(step), name): float(value) for step, name, value in found}


FAULTS = {
    "test_what_is_logged_is_there": [DropsAMetric, WholeNumbers, NeverFlushes],
    "test_a_resumed_run_goes_on_after_its_step": [BeginsAnew, KeepsLaterSteps],
    "test_a_run_without_steps_leaves_nothing_broken": [MarksItsEnd],
    "test_two_runs_do_not_meet": [Shared],
}


@each_fault(TrackerConformance, FAULTS)
def test_the_fault_is_noticed(fault, method, tmp_path):
    caught(Kit, method, make=fault, tmp_path=tmp_path)


@each_invariant(TrackerConformance)
def test_a_good_tracker_passes(method, tmp_path):
    getattr(Kit(), method)(Lines, tmp_path)


def test_what_cannot_be_read_is_logged_and_not_compared(tmp_path):
    made = []

    def make():
        made.append(Lines())
        return made[-1]

    with pytest.raises(pytest.skip.Exception, match=r"logged\(\) is not overridden"):
        TrackerConformance().test_what_is_logged_is_there(make, tmp_path)
    assert len(made[0].lines) == 5
