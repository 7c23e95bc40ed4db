"""What a process writes about itself, read by another one."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

import pytest

from hybridflow.core.processes import page
from hybridflow.core.processes.look import look_at, looks
from hybridflow.core.processes.page import MOST_NOTES, begin, doing, moved


@pytest.fixture
def own(tmp_path):
    """The page of this process."""
    begin(tmp_path, "rank 3 of pool 'main'")
    yield page.own()
    page.end()


def seen(own):
    return look_at(own.file)


def test_a_page_has_who_it_is_and_what_it_does_the_innermost_last(own):
    look = seen(own)
    assert (look.name, look.pid, look.place[1]) == (
        "rank 3 of pool 'main'",
        os.getpid(),
        os.getpid(),
    )
    assert look.notes == () and look.state == ""
    with doing("reward/score"):
        time.sleep(0.05)
        with doing("reward 'slow', row 17", limit_s=30.0):
            outer, inner = seen(own).notes
    assert (outer.text, inner.text) == ("reward/score", "reward 'slow', row 17")
    assert outer.seconds >= 0.05 > inner.seconds
    assert math.isinf(outer.left_s) and 29.0 < inner.left_s <= 30.0
    assert outer.thread == threading.get_ident()
    assert seen(own).notes == ()


def test_a_note_ends_with_its_body_also_where_that_raises_and_in_any_order(own):
    with pytest.raises(ZeroDivisionError), doing("fails"):
        1 / 0  # noqa: B018
    first, second = doing("first"), doing("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [note.text for note in seen(own).notes] == ["second"]
    second.__exit__(None, None, None)
    assert seen(own).notes == ()


def test_notes_and_signs_of_progress_are_movements(own):
    with doing("update"):
        begun = own.moved_at
        time.sleep(0.1)
        assert seen(own).still_s >= 0.1 and own.moved_at == begun
        moved()
        before = own.moved_at
        assert before >= begun + 0.1
        time.sleep(0.1)
    assert own.moved_at - before >= 0.1


def test_long_texts_are_cut_at_a_character_and_of_too_many_notes_the_newest_are_shown(own):
    with doing("ä" * 200):
        [note] = seen(own).notes
        assert note.text == "ä" * 84  # of two bytes each, in 168
    bodies = [doing(f"note {number}") for number in range(MOST_NOTES + 5)]
    for body in bodies:
        body.__enter__()
    newest = [f"note {number}" for number in range(5, MOST_NOTES + 5)]
    assert [note.text for note in seen(own).notes] == newest
    for body in reversed(bodies):
        body.__exit__(None, None, None)
    assert seen(own).notes == () and own.file.stat().st_size == page.SIZE


def test_a_thread_has_its_own_notes_on_the_page_of_its_process(own):
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with doing("environment: episode 2"):
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    with doing("main"):
        of_thread, of_main = seen(own).notes
    go_on.set()
    thread.join()
    assert (of_thread.text, of_thread.thread) == ("environment: episode 2", thread.ident)
    assert (of_main.text, of_main.thread) == ("main", threading.get_ident())


def test_a_forked_process_leaves_the_page_alone(own):
    with doing("the parent's"):
        child = os.fork()
        if not child:
            with doing("the child's"):
                os._exit(0 if page.own() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert [note.text for note in seen(own).notes] == ["the parent's"]


def test_without_a_page_nothing_is_written_and_nothing_fails(tmp_path):
    begin(None, "nobody")
    assert page.own() is None and page.environment() == {}
    with doing("anything"):
        moved()
    blocked = tmp_path / "a file"
    blocked.touch()
    begin(blocked, "nobody")  # no folder can be made there
    assert page.own() is None


def test_a_page_is_begun_once_unless_another_is_asked_for_and_ends_with_its_files(own, tmp_path):
    begin(tmp_path / "other", "another name")
    assert page.own() is own
    assert page.environment() == {page.FOLDER: str(tmp_path)}
    begin(tmp_path / "other", "another name", again=True)
    assert not list(tmp_path.glob("*.*"))
    assert [look.name for look in looks(tmp_path / "other")] == ["another name"]


def test_a_handler_of_the_programs_own_is_left_alone(tmp_path):
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        handler = signal.getsignal(signal.SIGUSR2)
        begin(tmp_path, "somebody")
        assert signal.getsignal(signal.SIGUSR2) is handler
        assert not list(tmp_path.glob("*.fault"))
    finally:
        page.end()
        signal.signal(signal.SIGUSR2, before)
