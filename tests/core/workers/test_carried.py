"""Sequences that go on in a later generation phase, by an engine that counts: every token is known by hand."""

from __future__ import annotations

import pytest
from helpers.counting import Counting, count_from, counting, update

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.workers.carried import Carried


def said(completions) -> list[tuple]:
    return [
        (made.id, made.response_ids.tolist(), made.weight_version.tolist(), made.finish_reason)
        for made in completions
    ]


def phase(carried: Carried, engine, rows) -> list:
    """What an engine does that takes turns with the training."""
    made = carried.collect(engine, rows)
    carried.stop(engine)
    return made


def test_a_phase_ends_with_its_own_rows_and_the_others_go_on_with_the_next_weights():
    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1, tokens=2), count_from(20, 2, tokens=5)])
    carried.open([count_from(30, 3, tokens=7), count_from(1, 4, tokens=1)])
    assert said(phase(carried, engine, [2, 1])) == [
        (2, [21, 22, 23, 24, 25], [1] * 5, "length"),
        (1, [11, 12], [1, 1], "length"),
    ]
    assert not engine.busy

    # Row 3 has five of its seven tokens, row 4 its only one; the next weights count by two.
    update(engine, 2, 2.0)
    carried.open([count_from(40, 5, tokens=9, stop_token_ids=(46,))])
    assert said(phase(carried, engine, [3, 4])) == [
        (3, [31, 32, 33, 34, 35, 37, 39], [1] * 5 + [2] * 2, "length"),
        (4, [2], [1], "length"),
    ]
    update(engine, 3, 1.0)
    [last] = phase(carried, engine, [5])
    assert said([last]) == [(5, [42, 44, 45, 46], [2, 2, 3, 3], "stop")]
    assert last.logprobs.tolist() == [-0.5] * 4


def test_rows_that_are_complete_already_need_no_engine():
    class Idle(Counting):
        def advance(self):
            raise AssertionError

    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1, tokens=3), count_from(20, 2, tokens=2)])
    phase(carried, engine, [1])
    assert said(phase(carried, counting(Idle), [2])) == [(2, [21, 22], [1, 1], "length")]
    assert phase(carried, counting(Idle), []) == []


def test_a_checkpoint_has_what_was_made_whatever_is_opened_again():
    engine, carried = counting(), Carried()
    rows = [count_from(10, 1, tokens=2), count_from(20, 2, tokens=4), count_from(30, 3, tokens=1)]
    carried.open(rows)
    phase(carried, engine, [1])
    kept = carried.unfinished()
    assert [row.prompt_ids.tolist() for row in kept] == [[20], [30]]
    assert said(row.made for row in kept) == [
        (2, [21, 22], [1, 1], "abort"),
        (3, [31], [1], "length"),
    ]

    again = Carried()
    again.load(kept)
    again.open(rows[1:])
    again.open([count_from(40, 4, tokens=1)])
    assert [str(row) for row in again.unfinished()[:2]] == [str(row) for row in kept]
    update(engine, 2, 2.0)
    assert said(phase(again, engine, [2, 3])) == [
        (2, [21, 22, 24, 26], [1, 1, 2, 2], "length"),
        (3, [31], [1], "length"),
    ]


def test_a_response_to_another_prompt_is_refused():
    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1), count_from(20, 2, tokens=9)])
    phase(carried, engine, [1])
    again = Carried()
    again.load(carried.unfinished())
    with pytest.raises(
        HybridFlowError, match=r"sample 2 goes on from a checkpoint.*to another prompt"
    ):
        again.open([count_from(21, 2)])


def test_a_row_that_was_not_opened_is_refused():
    carried = Carried()
    carried.open([count_from(10, 1)])
    with pytest.raises(HybridFlowError, match="samples 7 are collected and were not opened"):
        phase(carried, counting(), [1, 7])


@pytest.mark.parametrize("when", ["generating", "aborting"])
def test_after_an_error_of_the_engine_everything_is_as_it_was_before_the_phase(when):
    class Fails(Counting):
        fails = True

        def advance(self):
            if when == "generating" and self.fails and len(self.running) == 1:
                raise ValueError("no more")
            return super().advance()

        def leave(self, ids):
            if when == "aborting" and self.fails:
                raise ValueError("no more")
            return super().leave(ids)

    engine, carried = counting(Fails), Carried()
    carried.open(
        [count_from(10, 1, tokens=1), count_from(20, 2, tokens=3), count_from(30, 3, tokens=9)]
    )
    wanted = [1, 2, 3] if when == "generating" else [1, 2]
    with pytest.raises(ValueError, match="no more"):
        phase(carried, engine, wanted)
    Fails.fails = False
    assert said(phase(carried, counting(), [3]))[0][1] == list(range(31, 40))
    if when == "generating":  # nothing was collected yet
        assert [one[1] for one in said(phase(carried, engine, [1, 2]))] == [[11], [21, 22, 23]]


def test_an_engine_that_aborts_by_itself_ends_the_row():
    class Aborts(Counting):
        def advance(self):
            return self.leave([next(iter(self.running))])

    carried = Carried()
    carried.open([count_from(10, 1, tokens=5)])
    assert said(phase(carried, counting(Aborts), [1])) == [(1, [], [], "abort")]


def test_an_engine_of_its_own_gives_what_is_complete_and_stops_for_weights():
    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1, tokens=2), count_from(20, 2, tokens=3)])
    carried.open([count_from(30, 3, tokens=9)])
    assert carried.finished() == []
    assert carried.advance(engine, 2) and engine.busy
    [(prompt, first)] = carried.finished()
    assert prompt.tolist() == [10] and said([first]) == [(1, [11, 12], [1, 1], "length")]
    assert carried.advance(engine, 1)
    assert said(row.made for row in carried.finished()) == [(2, [21, 22, 23], [1] * 3, "length")]
    assert carried.finished() == []

    # Row 3 has three tokens; what is opened now enters with the next call, beside what it goes on with.
    carried.open([count_from(40, 4, tokens=1)])
    carried.stop(engine)
    assert not engine.busy
    assert said(row.made for row in carried.unfinished()) == [
        (3, [31, 32, 33], [1] * 3, "abort"),
        (4, [], [], "abort"),
    ]
    update(engine, 2, 2.0)
    assert carried.advance(engine, 1)
    assert not carried.advance(engine, 100)
    assert said(row.made for row in carried.finished()) == [
        (4, [42], [2], "length"),
        (3, [31, 32, 33, 35, 37, 39, 41, 43, 45], [1] * 3 + [2] * 6, "length"),
    ]
    carried.stop(engine)
    assert carried.unfinished() == []


def test_what_a_checkpoint_has_complete_needs_no_step():
    engine, carried = counting(), Carried()
    rows = [count_from(10, 1, tokens=1), count_from(20, 2, tokens=3)]
    carried.open(rows)
    carried.advance(engine, 1)
    carried.stop(engine)
    again = Carried()
    again.load(carried.unfinished())
    again.open(rows)
    assert again.advance(engine, 0)
    assert said(row.made for row in again.finished()) == [(1, [11], [1], "length")]
    again.stop(engine)
    assert said(row.made for row in again.unfinished()) == [(2, [21], [1], "abort")]
