"""What a tracker has from its contract."""

from __future__ import annotations

from hybridflow.core.contracts.tracker import Tracker, remove_later_lines


class Kept(Tracker):
    def start(self, folder, step):
        self.steps = {}

    def log(self, step, metrics):
        self.steps[step] = dict(metrics)


def test_a_tracker_keeps_its_settings_and_needs_no_end(tmp_path):
    settings = object()
    tracker = Kept(settings)
    tracker.start(tmp_path, 0)
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert tracker.config is settings
    assert tracker.steps == {1: {"loss": 0.5}}
    assert Kept().config is None


def test_later_lines_and_half_written_ones_are_removed(tmp_path):
    path = tmp_path / "lines.jsonl"
    remove_later_lines(path, 1)
    assert not path.exists()
    whole = '{"step": 1}\n{"step": 2}\n{"step": 2}\n'
    for left in ('{"step": 3}\n', '{"step": 2', '{"other": 1}\n', ""):
        path.write_text(whole + left)
        remove_later_lines(path, 2)
        assert path.read_text() == whole
    remove_later_lines(path, 0)
    assert path.read_text() == "" and list(tmp_path.iterdir()) == [path]
