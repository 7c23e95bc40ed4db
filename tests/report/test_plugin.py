"""Who is given a recorder."""

from helpers.jobs import job

from hybridflow.core.plugins import Registry
from hybridflow.report.recorder import RunRecording


def test_a_run_has_a_recorder_unless_it_has_nothing_to_do():
    ours = Registry().load()

    def recorders(*overrides):
        answers = ours.notify("hybridflow_observers", job=job(*overrides))
        return [type(one) for answer in answers for one in answer]

    nothing = ["run.samples=0", "run.timeline_mb=0", "run.report=false"]
    assert recorders() == [RunRecording]
    for at in range(3):
        assert recorders(*nothing[:at], *nothing[at + 1 :]) == [RunRecording]
    assert recorders(*nothing) == []
