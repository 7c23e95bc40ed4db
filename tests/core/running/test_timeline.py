"""Seconds of calls, from the workers' clocks."""

from hybridflow.core.groups.host import Reply
from hybridflow.core.running.timeline import Timeline


def test_a_phase_takes_as_long_as_on_its_busiest_rank():
    timeline = Timeline()
    for rank, started, ended in ((0, 1.0, 2.0), (1, 1.0, 2.5), (0, 3.0, 4.0), (1, 3.0, 3.25)):
        timeline.add("actor", "update", rank, Reply(None, None, started, ended))
    timeline.add("tasks", "draw", 0, Reply(None, None, 0.0, 0.5))
    # rank 0: 1 + 1, rank 1: 1.5 + 0.25
    assert timeline.take() == {"actor/update": 2.0, "tasks/draw": 0.5}
    assert timeline.take() == {}
