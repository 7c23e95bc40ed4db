"""What each process did and when, and for whom it waited."""

import pytest

from hybridflow.core.groups.outbox import Call
from hybridflow.core.running.timeline import Timeline


def call(role, method, rank, started, ended, sent=0.0, after=(), pool="main", read=None, parts=()):
    return Call(
        pool, rank, role, method, sent, after, started, ended, parts, read or (ended, ended)
    )


def test_a_phase_takes_as_long_as_on_its_busiest_rank():
    timeline = Timeline()
    for rank, started, ended in ((0, 1.0, 2.0), (1, 1.0, 2.5), (0, 3.0, 4.0), (1, 3.0, 3.25)):
        timeline.add(call("actor", "update", rank, started, ended))
    timeline.add(call("tasks", "draw", 0, 0.0, 0.5))
    # rank 0: 1 + 1, rank 1: 1.5 + 0.25
    assert timeline.take().phases == {"actor/update": 2.0, "tasks/draw": 0.5}
    assert timeline.take().phases == {}


def test_a_wait_has_the_last_of_those_whose_results_were_needed_as_its_cause():
    timeline = Timeline()
    generated = call("actor", "generate", 0, 10.0, 14.0, sent=9.9)
    scored = call("reward", "score", 0, 14.0, 17.0, sent=10.0, after=(generated,), pool="judges")
    inferred = call("ref", "logprobs", 1, 14.1, 15.0, sent=10.0, after=(generated,))
    # The actor's rank has both, and begins when the reward is there.
    parts = (("losses", 17.1, 18.0), ("optimizer", 18.0, 18.0002))
    updated = call("actor", "update", 0, 17.1, 18.5, 10.1, (scored, inferred), parts=parts)
    # The controller sent this one long after what it needs was there.
    drawn = call("data", "draw", 0, 21.0, 21.5, sent=20.9, after=(updated,), read=(20.9, 21.6))
    for one in (scored, updated, generated, inferred, drawn):
        timeline.add(one)
    spans = {(span.role, span.name): span for span in timeline.take().spans}

    waits = {
        key: (span.process, pytest.approx(span.waited), span.waited_for)
        for key, span in spans.items()
    }
    assert waits["actor", "generate"] == ("main/0", 0.0, "")
    assert waits["reward", "score"] == ("judges/0", 0.0, "")  # nothing is known from before
    assert waits["actor", "update"] == ("main/0", 3.1, "reward/score@judges/0")
    assert waits["data", "draw"] == ("main/0", 2.5, "controller")
    losses = spans["actor", "update/losses"]
    assert (losses.start, losses.seconds) == (17.1, pytest.approx(0.9))
    assert ("actor", "update/optimizer") not in spans  # too short
    [waited] = [span for span in spans.values() if span.process == "controller"]
    assert (waited.start, waited.waited_for) == (20.9, "data/draw@main/0")
    assert waited.seconds == pytest.approx(0.7)

    # The controller waits for one result, and another one took the time.
    slow = call("reward", "score", 0, 30.0, 35.0, sent=30.0, pool="judges", read=(36.2, 36.2))
    quick = call("tasks", "compute", 0, 35.0, 35.1, 30.0, (slow,), read=(30.1, 35.2))
    for one in (quick, slow):
        timeline.add(one)
    [wait] = [span for span in timeline.take().spans if span.process == "controller"]
    assert (wait.role, wait.waited_for) == ("tasks", "reward/score@judges/0")

    # The end of a step's last call counts in the next one, and no call keeps those before it.
    timeline.add(call("actor", "generate", 0, 37.0, 38.0, sent=36.7))
    [span] = timeline.take().spans
    assert (span.waited, span.waited_for) == (pytest.approx(1.9), "controller")
    assert updated.after == ()


def test_moments_of_one_piece_of_work_are_one_span():
    timeline = Timeline()
    for rank, started, ended in ((0, 1.0, 1.1), (1, 1.0, 1.1), (0, 1.101, 1.2), (0, 1.205, 1.3)):
        timeline.add(call("actor.rollout", "advance", rank, started, ended))
    timeline.add(call("actor.rollout", "advance", 0, 1.5, 1.6))  # not at once
    timeline.add(call("actor.rollout", "collect", 0, 1.6, 1.7))
    timeline.add(call("actor.rollout", "collect", 0, 1.7, 1.8))
    taken = timeline.take()
    spans = [(one.process, one.name, one.start, one.start + one.seconds) for one in taken.spans]
    assert sorted(spans) == [
        ("main/0", "advance", 1.0, pytest.approx(1.3)),
        ("main/0", "advance", 1.5, pytest.approx(1.6)),
        ("main/0", "collect", 1.6, pytest.approx(1.7)),
        ("main/0", "collect", 1.7, pytest.approx(1.8)),
        ("main/1", "advance", 1.0, pytest.approx(1.1)),
    ]
    # What comes later is of the next step.
    timeline.add(call("actor.rollout", "advance", 0, 1.601, 1.7))
    assert [span.start for span in timeline.take().spans] == [1.601]
