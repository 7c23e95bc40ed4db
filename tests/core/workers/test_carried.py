"""Sequences that go on in a later generation phase, by an engine that counts: every token is known by hand."""

from __future__ import annotations

import numpy as np
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
    made = carried.collect(engine, rows, 1)
    carried.stop(engine)
    return made


def test_a_phase_ends_with_its_own_rows_and_the_others_go_on_with_the_next_weights():
    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1, tokens=2), count_from(20, 2, tokens=5)], 1)
    carried.open([count_from(30, 3, tokens=7), count_from(1, 4, tokens=1)], 1)
    assert said(phase(carried, engine, [2, 1])) == [
        (2, [21, 22, 23, 24, 25], [1] * 5, "length"),
        (1, [11, 12], [1, 1], "length"),
    ]
    assert not engine.busy

    # Row 3 has five of its seven tokens, row 4 its only one; the next weights count by two.
    update(engine, 2, 2.0)
    carried.open([count_from(40, 5, tokens=9, stop_token_ids=(46,))], 1)
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
    carried.open([count_from(10, 1, tokens=3), count_from(20, 2, tokens=2)], 1)
    phase(carried, engine, [1])
    assert said(phase(carried, counting(Idle), [2])) == [(2, [21, 22], [1, 1], "length")]
    assert phase(carried, counting(Idle), []) == []


def test_a_checkpoint_has_what_was_made_whatever_is_opened_again():
    engine, carried = counting(), Carried()
    rows = [count_from(10, 1, tokens=2), count_from(20, 2, tokens=4), count_from(30, 3, tokens=1)]
    carried.open(rows, 1)
    carried.publish(4, 1)
    phase(carried, engine, [1])
    kept = carried.unfinished()
    assert [row.prompt_ids.tolist() for row in kept] == [[20], [30]]
    assert said(row.made for row in kept) == [
        (2, [21, 22], [1, 1], "abort"),
        (3, [31], [1], "length"),
    ]

    again = Carried()
    again.load(kept, carried.published)
    again.open(rows[1:], 1)
    again.open([count_from(40, 4, tokens=1)], 1)
    assert [str(row) for row in again.unfinished()[:2]] == [str(row) for row in kept]
    update(engine, 2, 2.0)
    again.publish(5, 2)
    assert said(phase(again, engine, [2, 3])) == [
        (2, [21, 22, 24, 26], [1, 1, 2, 2], "length"),
        (3, [31], [1], "length"),
    ]
    assert again.lags(np.array([1, 1, 2, 2]), 6).tolist() == [1, 1, 0, 0]


def test_a_response_to_another_prompt_is_refused():
    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1), count_from(20, 2, tokens=9)], 1)
    phase(carried, engine, [1])
    again = Carried()
    again.load(carried.unfinished(), {})
    with pytest.raises(
        HybridFlowError, match=r"sample 2 goes on from a checkpoint.*to another prompt"
    ):
        again.open([count_from(21, 2)], 1)


def test_a_row_that_was_not_opened_is_refused():
    carried = Carried()
    carried.open([count_from(10, 1)], 1)
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
        [count_from(10, 1, tokens=1), count_from(20, 2, tokens=3), count_from(30, 3, tokens=9)], 1
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
    carried.open([count_from(10, 1, tokens=5)], 1)
    assert said(phase(carried, counting(Aborts), [1])) == [(1, [], [], "abort")]


def test_a_token_lags_by_the_steps_since_its_weights_were_the_newest():
    carried = Carried()
    # Two updates in steps 1 and 3, none in step 2.
    for step, version in ((1, 0), (2, 2), (3, 2), (4, 4)):
        carried.publish(step - 1, version)
    carried.publish(3, 6)  # a second phase of the step, after an update
    versions = np.array([0, 1, 2, 3, 4, 5])
    assert carried.lags(versions, 4).tolist() == [3, 3, 1, 1, 0, 0]
    assert carried.lags(np.array([0, 2, 4]), 3).tolist() == [2, 0, 0]
    assert carried.lags(np.array([], np.int64), 4).tolist() == []
    # Versions of steps that no bound reaches are forgotten.
    for step in range(5, 40):
        carried.publish(step - 1, 2 * step)
    assert sorted(carried.published) == list(range(39 - 16, 39))
    late = Carried()
    late.publish(7, 5)
    assert late.lags(np.array([4, 5]), 8).tolist() == [1, 0]


def test_an_engine_of_its_own_goes_on_after_a_collection_and_stops_for_weights():
    engine, carried = counting(), Carried()
    carried.open([count_from(10, 1, tokens=2), count_from(20, 2, tokens=3)], 1)
    carried.open([count_from(30, 3, tokens=9)], 2)
    carried.open([], 3)
    assert carried.complete_steps() == [3]
    assert carried.advance(engine, 2) and carried.complete_steps() == [3]
    assert said(carried.collect(engine, [1], 1)) == [(1, [11, 12], [1, 1], "length")]
    assert engine.busy
    assert carried.advance(engine, 1)
    assert said(carried.collect(engine, [2], 1)) == [(2, [21, 22, 23], [1] * 3, "length")]

    # Row 3 has three tokens; what is opened now enters with the next call, beside what it goes on with.
    carried.open([count_from(40, 4, tokens=1)], 4)
    carried.stop(engine)
    assert not engine.busy
    assert said(row.made for row in carried.unfinished()) == [
        (3, [31, 32, 33], [1] * 3, "abort"),
        (4, [], [], "abort"),
    ]
    update(engine, 2, 2.0)
    assert carried.advance(engine, 1) and carried.complete_steps() == [3, 4]
    assert not carried.advance(engine, 100) and carried.complete_steps() == [2, 3, 4]
    assert said(carried.collect(engine, [3], 2)) == [
        (3, [31, 32, 33, 35, 37, 39, 41, 43, 45], [1] * 3 + [2] * 6, "length")
    ]
    assert said(carried.collect(engine, [4], 4)) == [(4, [42], [2], "length")]
    carried.stop(engine)
    assert carried.unfinished() == []
