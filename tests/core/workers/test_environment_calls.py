"""Calls of environments in threads: side by side, limited, with deadlines, as coroutines too."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from helpers.waiting import eventually

from hybridflow.core.processes import page
from hybridflow.core.processes.look import looks
from hybridflow.core.workers.environment_calls import EnvironmentCalls

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def make():
    """`make(at_once, timeout_s)`: calls that are closed at the end."""
    made = []

    def make(*settings, **options) -> EnvironmentCalls:
        made.append(EnvironmentCalls(*settings, **options))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


def all_of(calls: EnvironmentCalls) -> dict:
    found = {}
    while calls.busy:
        found |= dict(calls.take(wait=True))
    return found


def test_each_call_is_answered_by_what_it_returned_or_raised(make):
    calls = make(4)

    def fails():
        raise OSError("no port")

    for key, call in enumerate((lambda: "said", fails)):
        calls.submit(key, call)
    found = all_of(calls)
    assert found[0].value == "said" and found[0].error is None
    assert isinstance(found[1].error, OSError)
    assert calls.take(wait=True) == []  # nothing is under way


def test_the_page_of_the_process_says_what_is_waited_for_and_which_call_it_is(make, tmp_path):
    page.begin(tmp_path, "rank 0")
    try:
        calls, answer = make(3, timeout_s=60.0, name="environment 'shell'"), threading.Event()
        for key in (5, 2):
            calls.submit(key, answer.wait)
        seen = []

        def look():
            seen.extend(eventually(lambda: [one for one in looks(tmp_path) if len(one.notes) == 3]))
            answer.set()

        looker = threading.Thread(target=look)
        looker.start()
        all_of(calls)
        looker.join()
    finally:
        page.end()
    notes = {note.text: note for note in seen[0].notes}
    waits = notes.pop("environment 'shell': answers to 2 episodes (2, 5)")
    assert waits.thread == threading.get_ident() and 0 < waits.left_s <= 60
    assert sorted(notes) == ["environment 'shell': episode 2", "environment 'shell': episode 5"]
    assert all(note.thread != waits.thread for note in notes.values())


def test_calls_run_side_by_side(make):
    calls, meet = make(3), threading.Barrier(3, timeout=10)
    for key in range(3):
        calls.submit(key, meet.wait)
    assert {answer.value for answer in all_of(calls).values()} == {0, 1, 2}


def test_no_more_than_so_many_run_at_once(make):
    calls, lock, running, most = make(2), threading.Lock(), [], []

    def call():
        with lock:
            running.append(1)
            most.append(len(running))
        threading.Event().wait(0.01)
        with lock:
            running.pop()

    for key in range(8):
        calls.submit(key, call)
    assert len(all_of(calls)) == 8
    assert max(most) == 2


def test_a_call_past_its_deadline_is_late_and_what_it_returns_later_is_dropped(make):
    calls, go_on = make(1, 0.05), threading.Event()
    calls.submit(0, go_on.wait)
    calls.submit(1, lambda: "next")  # there is room once the first one is given up
    found = all_of(calls)
    assert found[0].late and found[1].value == "next"
    assert calls.abandoned == 1
    calls.submit(0, lambda: "again")  # under the same key
    go_on.set()
    assert all_of(calls)[0].value == "again"


def test_a_coroutine_is_awaited_and_cancelled_at_its_deadline(make):
    calls, cancelled = make(2, 0.05), threading.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def answers():
        await asyncio.sleep(0)
        return "said"

    async def own_timeout():
        raise TimeoutError("a server's")

    for key, call in enumerate((waits, answers, own_timeout)):
        calls.submit(key, call)
    found = all_of(calls)
    assert found[0].late and found[1].value == "said"
    assert str(found[2].error) == "a server's"
    assert cancelled.wait(10)


def test_coroutines_that_run_are_cancelled_when_the_calls_are_closed(make):
    calls, begun, cancelled = make(1), threading.Event(), threading.Event()

    async def waits():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # as one that tells its server
            cancelled.set()

    before = threading.active_count()
    calls.submit(0, waits)
    assert begun.wait(10)
    calls.close()
    assert cancelled.wait(10) and not calls.busy
    # Those of tests before may end meanwhile.
    eventually(lambda: threading.active_count() <= before)  # the call's thread and the loop's


def test_whoever_waits_elsewhere_hears_of_each_answer(make):
    heard = threading.Semaphore(0)
    calls = make(2, arrived=heard.release)
    for key in range(2):
        calls.submit(key, lambda: None)
    for _ in range(2):
        assert heard.acquire(timeout=10)
    assert sorted(key for key, _ in calls.take()) == [0, 1]


def test_a_call_that_exits_is_answered_too(make):
    calls = make(1)

    def exits():
        raise SystemExit(3)

    async def exits_in_the_loop():
        raise SystemExit(4)

    async def answers():
        return "said"

    for key, call in enumerate((exits, exits_in_the_loop, answers)):
        calls.submit(key, call)
    found = all_of(calls)
    assert [found[key].error.code for key in (0, 1)] == [3, 4] and found[2].value == "said"


def test_drained_calls_have_ended_or_are_given_up_and_none_begins(make):
    calls, go_on, begun = make(2), threading.Event(), []
    ended = threading.Event()
    calls.submit(0, ended.set)
    calls.submit(1, go_on.wait)
    calls.submit(2, lambda: begun.append(2))
    calls.drain(0.2)
    assert ended.is_set() and not begun and not calls.busy
    assert calls.abandoned == 1
    go_on.set()


def test_a_call_has_the_time_that_is_left_to_its_caller(make):
    calls, go_on = make(2, 60.0), threading.Event()
    started = time.monotonic()
    calls.submit(0, go_on.wait, started + 0.1)
    calls.submit(1, lambda: "said", started + 60)
    found = all_of(calls)
    assert found[0].late and found[1].value == "said" and time.monotonic() - started < 30
    go_on.set()


def test_whoever_waits_elsewhere_hears_of_a_deadline_too(make):
    heard, go_on = threading.Event(), threading.Event()
    calls = make(1, 0.05, arrived=heard.set)
    calls.submit(0, go_on.wait)
    assert heard.wait(10)
    assert [(key, answer.late) for key, answer in calls.take()] == [(0, True)]
    go_on.set()


def test_a_coroutine_that_comes_after_the_end_begins_nothing(make):
    calls, go_on, begun = make(1), threading.Event(), []

    async def waits():
        begun.append(1)

    def late():
        go_on.wait(10)
        return waits()

    calls.submit(0, late)
    before = threading.active_count()
    calls.close()
    go_on.set()
    eventually(lambda: threading.active_count() < before)
    assert not begun
