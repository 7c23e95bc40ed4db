"""What is told of calls that run for long: once, with the process, and later if it goes on."""

from __future__ import annotations

import pytest

from hybridflow.backends.ray import slow as module
from hybridflow.backends.ray.slow import SlowCalls
from hybridflow.core.contracts.runtime import Label

UPDATE, SCORE = Label("actor", "update"), Label("reward", "score")


@pytest.fixture
def looked(monkeypatch):
    """A function (second, what each process works on) that looks, and what was said."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    said: list[str] = []
    calls = SlowCalls(said.append)

    def look(second, *running):
        clock[0] = second
        calls.look(running, lambda process: f"process {process}")

    return look, said


def test_a_call_is_told_of_once_with_its_processes_and_again_much_later(looked):
    look, said = looked
    for second in (0, 20, 39):
        look(second, ("a", 1, UPDATE), ("b", 2, UPDATE), ("c", 3, SCORE))
    assert said == []
    look(40, ("a", 1, UPDATE), ("b", 2, UPDATE))
    [first] = said
    assert first.startswith(
        "actor/update has run for 40 s (none was seen before) on process a, process b. "
    )
    assert "py-spy dump" in first and "--resume" in first
    for second in (41, 80, 119):
        look(second, ("a", 1, UPDATE), ("b", 2, UPDATE))
    assert len(said) == 1
    look(120, ("a", 1, UPDATE), ("b", 2, UPDATE))
    assert len(said) == 2 and "for 120 s" in said[1]


def test_what_always_takes_long_is_told_of_once(looked):
    look, said = looked
    look(0, ("a", 1, UPDATE))
    look(90, ("a", 1, UPDATE))
    assert len(said) == 1
    # The next ones take as long as the first, or twice as long; the third hangs.
    for reference, begin, end in ((2, 100, 200), (3, 200, 380)):
        look(begin, ("a", reference, UPDATE))
        look(end, ("a", reference, UPDATE))
    assert len(said) == 1
    look(400, ("a", 4, UPDATE))
    look(400 + 3 * 200, ("a", 4, UPDATE))
    assert len(said) == 2 and "the longest before took 200 s" in said[1]


def test_many_processes_are_named_in_part(looked):
    look, said = looked
    ranks = [(rank, rank, UPDATE) for rank in range(6)]
    look(0, *ranks)
    look(50, *ranks)
    assert said[0].count("process ") == 4 and "process 3 and 2 more. " in said[0]
