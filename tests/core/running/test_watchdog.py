"""What stands still is told, with what it does; and ended where that was asked for."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time

import attrs
import pytest
from helpers.paths import ROOT
from helpers.sleepers import sleeper
from helpers.waiting import eventually

from hybridflow.core.contracts.runtime import Label, Process, ResourcePool
from hybridflow.core.errors import HangError, WorkerDied
from hybridflow.core.job.sections import RunSection
from hybridflow.core.processes import page
from hybridflow.core.processes.look import Frame, Look, Note, Thread
from hybridflow.core.running import watchdog as module
from hybridflow.core.running.folder import StopSignal
from hybridflow.core.running.watchdog import Watchdog, described, place_of

HERE = platform.node()
MINE = Frame("/home/me/rewards.py", 33, "fetch")
ALL_REDUCE = Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce")


class Rank(Process):
    def __init__(self, rank: int, pid: int, pool: ResourcePool):
        self.rank, self.place, self.pool = rank, (HERE, pid), pool

    def submit(self, message, label):
        raise NotImplementedError


def doing(rank: int, text: str, seconds: float, *frames: Frame, **more) -> Look:
    """What a rank does: its innermost note, and its stack, the innermost call first."""
    note = Note(text, seconds, more.pop("left_s", float("inf")), 7)
    state = more.pop("state", "")
    name = f"rank {rank} of pool 'main'"
    return Look(name, 100 + rank, HERE, state, seconds, (note,), threads=(Thread(7, frames),))


class Runtime:
    """A runtime of two ranks: what they work on, and their looks, are set by the test."""

    def __init__(self):
        pool = ResourcePool("main", (2,))
        self.ranks = [Rank(rank, 100 + rank, pool) for rank in range(2)]
        self.calls, self.looks, self.killed = [], [], []

    def at_work(self):
        return self.calls

    def look(self, folder, stacks=False):
        return [one if stacks else attrs.evolve(one, threads=()) for one in self.looks]

    def kill(self, look):
        self.killed.append(look.pid)

    def lost(self):
        return None


@pytest.fixture
def clock(monkeypatch):
    """Time as the watch sees it."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def watched(tmp_path, clock):
    """A watch that is not entered: the test has it look."""

    def make(**settings):
        runtime, told = Runtime(), []
        section = RunSection(patience_s=100.0, **settings)
        watch = Watchdog(section, tmp_path, runtime, told.append, StopSignal())
        watch.step = lambda: 11
        watch.begin()
        return watch, runtime, told

    return make


def pass_(clock, watch, runtime, seconds: float) -> None:
    """Let time pass in which no rank moves, and look."""
    clock[0] += seconds
    runtime.looks = [attrs.evolve(one, still_s=one.still_s + seconds) for one in runtime.looks]
    watch.look()


def test_a_rank_that_does_not_move_is_told_with_what_it_does_again_and_when_it_goes_on(
    watched, clock, tmp_path
):
    watch, runtime, told = watched()
    runtime.calls = [(runtime.ranks[0], Label("reward", "score"))]
    runtime.looks = [doing(0, "reward 'slow', row 17", 0.0, MINE)]
    watch.look()
    pass_(clock, watch, runtime, 99.0)
    assert told == []
    pass_(clock, watch, runtime, 2.0)
    [line] = told
    assert line.startswith("step 12 waits for reward/score, in which nothing has moved since ")
    assert "(101 s): rank 0 of pool 'main' (pid 100 on " in line
    assert (
        "is at reward 'slow', row 17 for 0 s, in fetch (me/rewards.py:33). It is left alone" in line
    )
    assert line.endswith(f"All stacks: hybridflow stacks {tmp_path}") and "\n" not in line

    pass_(clock, watch, runtime, 90.0)
    assert len(told) == 1
    pass_(clock, watch, runtime, 20.0)
    assert len(told) == 2 and "(211 s)" in told[1]  # again, after twice the time

    runtime.looks = [doing(0, "reward 'slow', row 18", 1.0, MINE)]
    pass_(clock, watch, runtime, 1.0)
    assert told[2:] == ["reward/score goes on, after 211 s"]


def test_a_call_that_takes_long_and_moves_is_not_told(watched, clock):
    watch, runtime, told = watched()
    runtime.calls = [(runtime.ranks[0], Label("actor", "generate"))]
    for _ in range(20):
        runtime.looks = [doing(0, "actor/generate", 0.0)]
        pass_(clock, watch, runtime, 60.0)
    assert told == []


def test_a_new_call_begins_anew(watched, clock):
    watch, runtime, told = watched()
    runtime.looks = [doing(0, "update", 0.0)]
    for _ in range(5):
        runtime.calls = [(runtime.ranks[0], Label("actor", "update"))]
        pass_(clock, watch, runtime, 1.0)
        pass_(clock, watch, runtime, 80.0)  # its page has not moved since before the call
    assert told == []


def test_calls_that_stood_still_before_and_went_on_may_do_so_three_times_as_long(watched, clock):
    watch, runtime, told = watched()
    runtime.looks = [doing(0, "compile 1", 0.0)]
    runtime.calls = [(runtime.ranks[0], Label("actor", "update"))]
    watch.look()
    pass_(clock, watch, runtime, 120.0)
    runtime.calls = []
    runtime.looks = [doing(0, "idle", 0.0)]
    watch.look()
    assert len(told) == 2 and told[1] == "actor/update goes on, after 120 s"

    runtime.calls = [(runtime.ranks[0], Label("actor", "update"))]
    runtime.looks = [doing(0, "compile 2", 0.0)]
    watch.look()
    pass_(clock, watch, runtime, 200.0)
    pass_(clock, watch, runtime, 155.0)
    assert len(told) == 2
    pass_(clock, watch, runtime, 10.0)
    assert len(told) == 3 and "(365 s)" in told[2]


def test_what_stood_still_at_something_else_teaches_nothing(watched, clock):
    """An engine that starts again, say, is waited for in the same call as its tokens."""
    watch, runtime, told = watched(hang="restart")
    runtime.calls = [(runtime.ranks[0], Label("actor", "generate"))]
    runtime.looks = [doing(0, "engine 7: start", 0.0, left_s=500.0)]
    watch.look()
    pass_(clock, watch, runtime, 150.0)
    runtime.looks = [doing(0, "engine 7: tokens", 0.0)]
    pass_(clock, watch, runtime, 0.0)
    assert told[1] == "actor/generate goes on, after 150 s" and runtime.killed == []
    pass_(clock, watch, runtime, 110.0)
    assert "(110 s)" in told[2] and runtime.killed == [100]


def test_ranks_that_wait_for_one_that_moves_are_not_told(watched, clock):
    watch, runtime, told = watched()
    label = Label("actor", "update")
    runtime.calls = [(rank, label) for rank in runtime.ranks]
    watch.look()
    for _ in range(5):
        waiting = doing(0, "actor/update", 300.0, ALL_REDUCE)
        runtime.looks = [waiting, doing(1, "actor/update", 0.0)]
        pass_(clock, watch, runtime, 60.0)
    assert told == []


def test_a_stopped_rank_is_named_with_the_remedy_and_the_others_wait_for_it(watched, clock):
    watch, runtime, told = watched(hang="restart")
    label = Label("actor", "update")
    runtime.calls = [(rank, label) for rank in runtime.ranks]
    stopped = doing(1, "actor/update", 0.0, state="stopped")
    runtime.looks = [doing(0, "actor/update", 0.0, ALL_REDUCE, MINE), stopped]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    [line] = told
    assert "rank 1 of pool 'main' (pid 101 on " in line
    assert (
        "is stopped (SIGSTOP); kill -CONT 101 lets it go on; rank 0 of pool 'main' waits for it (all_reduce). It is ended now"
        in line
    )
    assert runtime.killed == [101]


def test_ranks_that_all_wait_for_each_other_are_at_fault_together(watched, clock):
    watch, runtime, told = watched(hang="restart")
    label = Label("actor", "update")
    runtime.calls = [(rank, label) for rank in runtime.ranks]
    runtime.looks = [doing(rank, "actor/update", 0.0, ALL_REDUCE) for rank in range(2)]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    assert (
        "rank 0 of pool 'main', rank 1 of pool 'main' wait for other ranks (all_reduce)" in told[0]
    )
    assert runtime.killed == [100, 101]


def engine(rank: int, state: str = "", still_s: float = 0.0) -> Look:
    """The process of a rank's engine."""
    note = Note("generate", 1.0, float("inf"), 1)
    return Look(
        f"engine of rank {rank}", 200 + rank, HERE, state, still_s, (note,), parent=100 + rank
    )


@pytest.mark.parametrize("state", ["", "stopped"])
def test_an_engine_is_at_fault_where_it_stands_still_and_its_rank_waits_for_it(
    watched, clock, state
):
    watch, runtime, told = watched(hang="restart")
    runtime.calls = [(runtime.ranks[0], Label("actor", "generate"))]
    runtime.looks = [doing(0, "tokens", 0.0, MINE), engine(0, state), engine(1)]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    assert "engine of rank 0 (pid 200 on" in told[0]
    assert "rank 0 of pool 'main' waits for it (tokens)" in told[0]
    assert runtime.killed == [200]  # the other one's rank is not waited for


def test_a_rank_whose_engine_moves_is_at_fault_itself_and_what_is_gone_is_nobodys_fault(
    watched, clock
):
    watch, runtime, _ = watched(hang="restart")
    runtime.calls = [(runtime.ranks[0], Label("actor", "generate"))]
    runtime.looks = [doing(0, "tokens", 0.0, MINE), engine(0, "gone")]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    assert runtime.killed == [100]


@pytest.mark.parametrize(
    ("place", "said"), [(None, "has not started"), ((HERE, 100), "says nothing of what it does")]
)
def test_a_rank_without_a_page_is_told_of_and_left_alone(watched, clock, place, said):
    watch, runtime, told = watched(hang="restart")
    runtime.ranks[0].place = place
    runtime.calls = [(runtime.ranks[0], Label("actor", "update"))]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    assert said in told[0] and "It is left alone, as it does not say what it does" in told[0]
    assert runtime.killed == []


@pytest.mark.parametrize("hang", ["restart", "end"])
def test_what_gives_up_by_itself_is_left_to_that(watched, clock, hang):
    watch, runtime, told = watched(hang=hang)
    runtime.calls = [(runtime.ranks[0], Label("reward", "score"))]
    runtime.looks = [doing(0, "reward 'slow', row 1", 0.0, MINE, left_s=500.0)]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    assert "at most 500 s more" in told[0] and "It is left to its own limit" in told[0]
    assert runtime.killed == []


def test_a_thread_that_was_given_up_is_not_what_a_process_is_about(watched, clock):
    """Its note stays, past its limit; the main thread has none."""
    watch, runtime, told = watched(hang="restart")
    runtime.calls = [(runtime.ranks[0], Label("reward", "score"))]
    look = doing(0, "reward/score", 0.0, MINE)
    given_up = Note("reward 'slow', row 3", 500.0, -400.0, 8)
    runtime.looks = [attrs.evolve(look, notes=(*look.notes, given_up))]
    watch.look()
    pass_(clock, watch, runtime, 110.0)
    assert "is at reward/score for 0 s, in fetch" in told[0] and "row 3" not in told[0]
    assert runtime.killed == [100]


def test_before_the_first_step_nothing_is_ended_that_may_load_a_model(watched, clock):
    watch, runtime, told = watched(hang="restart")
    watch._begun = False
    runtime.calls = [(runtime.ranks[0], Label("actor", "build"))]
    runtime.looks = [doing(0, "actor/build", 0.0, MINE)]
    watch.look()
    for _ in range(20):
        pass_(clock, watch, runtime, 110.0)
    assert told and all("It is left alone before the first step" in line for line in told)
    assert runtime.killed == []
    runtime.looks = [attrs.evolve(one, state="stopped") for one in runtime.looks]
    pass_(clock, watch, runtime, 5000.0)
    assert runtime.killed == [100]


@pytest.mark.parametrize("what", ["moves", "ends", "leaves"])
def test_what_goes_on_while_its_stacks_are_collected_is_not_ended(watched, clock, what):
    watch, runtime, told = watched(hang="restart")
    call = (runtime.ranks[0], Label("actor", "update"))
    runtime.calls = [call]
    runtime.looks = [doing(0, "actor/update", 0.0, MINE)]
    watch.look()
    plain = runtime.look

    def look(folder, stacks=False):
        found = plain(folder, stacks)
        if stacks and what == "moves":
            runtime.looks = [doing(0, "actor/update", 0.1, MINE)]
        elif stacks and what == "ends":
            runtime.calls = [(runtime.ranks[0], Label("actor", "update"))]
        elif stacks:
            watch._leave()
        return found

    runtime.look = look
    watch._thread.start()
    pass_(clock, watch, runtime, 110.0)
    assert len(told) == (what == "leaves") and runtime.killed == []


def test_what_was_killed_teaches_nothing_of_how_long_such_calls_take(watched, clock):
    watch, runtime, told = watched(hang="restart")
    for attempt in range(3):
        runtime.calls = [(runtime.ranks[0], Label("actor", "generate"))]
        runtime.looks = [doing(0, "tokens", 0.0, MINE)]
        watch.look()
        pass_(clock, watch, runtime, 110.0)
        assert runtime.killed == [100] * (attempt + 1)
        runtime.calls, runtime.looks = [], [doing(0, "tokens", 0.0, MINE, state="gone")]
        watch.look()
        runtime.ranks[0].place = (HERE, 100)
    assert not any("goes on" in line for line in told)


def test_an_error_while_it_looks_is_told_once_and_it_looks_again(runs, monkeypatch):
    stop, watch, told = runs("say")

    def fails():
        raise ValueError("no such node")

    watch.runtime.at_work = fails
    with stop, watch:
        eventually(lambda: told)
        time.sleep(0.2)
        assert len(told) == 1 and "the watchdog could not look" in told[0]
        watch.runtime.at_work = list
        with page.doing("reward/score"):
            eventually(lambda: len(told) == 2)
    assert "waits for reward/score" in told[1]


# --- with the controller itself ---


@pytest.fixture
def runs(tmp_path):
    """Enters a watch whose runtime has no ranks, with a patience of 0.3 s."""

    def make(hang: str):
        told, stop = [], StopSignal()
        section = RunSection(patience_s=0.3, hang=hang)
        watch = Watchdog(section, tmp_path / "run", Runtime(), told.append, stop)
        watch.begin()
        return stop, watch, told

    return make


def hangs_for(seconds: float) -> None:
    time.sleep(seconds)


def hangs_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_stopped_process_does_not_outlive_its_run(runs, tmp_path):
    """It cannot see that the run has ended; of a controller that was killed, the next one ends it."""
    pages = tmp_path / "run/processes"
    pages.mkdir(parents=True)
    with sleeper(pages, stopped=True) as left, sleeper(pages, stopped=False) as busy:
        stop, watch, _ = runs("say")
        with stop, watch:
            assert left.wait(30) == -signal.SIGKILL
            with sleeper(pages, stopped=True) as later:
                watch.__exit__(None, None, None)
                assert later.wait(30) == -signal.SIGKILL
        assert busy.poll() is None  # it sees the end by itself


def test_a_controller_that_hangs_is_told_with_where_it_is(runs, tmp_path):
    stop, watch, told = runs("say")
    with stop, watch, page.doing("Tracker: the metrics of step 3"):
        hangs_until(lambda: told)
    assert "Tracker: the metrics of step 3, in which nothing has moved" in told[0]
    assert f"controller (pid {os.getpid()} on {HERE})" in told[0]
    assert "in hangs_until (running/test_watchdog.py:" in told[0]
    assert os.environ.get(page.FOLDER) is None and page.own() is None
    assert not (tmp_path / "run" / "processes").exists()


@pytest.mark.parametrize(("hang", "error"), [("end", HangError), ("restart", WorkerDied)])
def test_a_controller_that_hangs_is_interrupted_by_setting(runs, hang, error):
    stop, watch, told = runs(hang)
    began = time.monotonic()
    with pytest.raises(error, match="is at reward/score"), stop, watch, page.doing("reward/score"):
        hangs_for(60)
    assert time.monotonic() - began < 30 and len(told) == 1
    # The signal that was used for it has its meaning again.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_reply_that_has_just_arrived_is_no_controller_that_hangs(watched, clock, tmp_path):
    """Its note is as old as the call was long, until the main thread has its turn."""
    watch, runtime, told = watched()
    runtime.calls = [(runtime.ranks[0], Label("actor", "generate"))]
    page.begin(tmp_path, "controller")
    try:
        with page.doing("waits for actor/generate of rank 0"):
            clock[0] += 500.0
            runtime.looks = [doing(0, "tokens", 0.0)]
            watch.look()
            runtime.calls = []
            watch.look()
            assert told == []
            clock[0] += 99.0
            watch.look()
            assert told == []
            clock[0] += 2.0
            watch.look()
            assert len(told) == 1 and "step 12 waits for actor/generate of rank 0, in" in told[0]
    finally:
        page.end()


def test_a_stopped_engine_that_the_controller_waited_for_teaches_it_no_patience(
    watched, clock, tmp_path
):
    watch, runtime, told = watched(hang="restart")
    page.begin(tmp_path, "controller")
    try:
        with page.doing("actor/generate"), page.doing("the engine (pid 200): tokens"):
            for killed in (1, 2):
                watch.look()
                runtime.looks = [engine(0, "stopped")]
                clock[0] += 110.0
                watch.look()
                assert runtime.killed == [200] * killed
                runtime.looks = []
                page.moved()
                watch.look()
    finally:
        page.end()
    assert told[1] == "actor/generate goes on, after 110 s" and len(told) == 4


@pytest.mark.parametrize(("hang", "within"), [("restart", "0.3"), ("say", "inf")])
def test_signs_are_made_from_the_start_to_the_end_also_while_it_looks(
    runs, monkeypatch, hang, within
):
    told = []
    monkeypatch.setattr(module.supervised, "tell", told.append)
    stop, watch, _ = runs(hang)
    monkeypatch.setattr(watch, "look", lambda: time.sleep(60))
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    with stop, watch:
        eventually(lambda: len(told) > 2)
    eventually(lambda: told[-1] == "within inf")
    assert told[0] == f"within {within}"


def test_a_run_without_its_supervisor_any_more_is_asked_to_stop_once(runs, monkeypatch):
    monkeypatch.setattr(module.supervised, "lost", lambda: True)
    stop, watch, _ = runs("say")
    stop._begun = True
    with stop, watch:
        eventually(lambda: stop.requested)
        stop.ask()  # no second signal, which would end this process
        time.sleep(0.05)


def test_a_controller_with_nothing_to_do_is_not_told(runs):
    stop, watch, told = runs("end")
    with stop, watch:
        hangs_for(0.6)
    assert told == []


def test_a_runtime_that_has_lost_a_part_ends_a_run_that_does_not_see_it(runs, monkeypatch):
    monkeypatch.setattr(module, "LOST_S", 0.2)
    stop, watch, _ = runs("say")
    watch.runtime.lost = lambda: "the gcs_server is gone"
    with pytest.raises(WorkerDied, match="the gcs_server is gone"), stop, watch:
        hangs_for(60)


def test_a_ctrl_c_and_an_error_of_the_run_are_not_taken_for_a_hang(runs):
    for error in (KeyboardInterrupt, ZeroDivisionError):
        stop, watch, _ = runs("end")
        with pytest.raises(error) as said, stop, watch:
            watch._interruption = (module.Hung(), HangError("of before, which was swallowed"))
            raise error
        assert type(said.value) is error


def test_an_interruption_that_something_swallows_is_given_up_once_the_run_goes_on(
    runs, monkeypatch
):
    monkeypatch.setattr(module, "AGAIN_S", 0.2)
    stop, watch, told = runs("end")
    with stop, watch, page.doing("reward/score"):
        with contextlib.suppress(KeyboardInterrupt):
            hangs_for(60)

        def given_up():
            page.moved()
            return [line for line in told if "something has taken the interruption" in line]

        eventually(given_up)


def test_a_run_in_another_thread_is_told_that_it_cannot_be_ended(runs):
    stop, watch, told = runs("end")

    def work():
        with stop, watch, page.doing("reward/score"):
            eventually(lambda: len(told) == 2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert "the run is in no main thread" in told[1]


def test_a_process_that_nothing_can_interrupt_ends_with_its_stacks(tmp_path):
    program = """
        import sys, threading
        from pathlib import Path
        from hybridflow.core.job.sections import RunSection
        from hybridflow.core.processes import page
        from hybridflow.core.running import watchdog as watch
        from hybridflow.core.running.folder import StopSignal
        sys.path.insert(0, "tests/core/running")
        from test_watchdog import Runtime

        watch.INTERRUPT_S, watch.AGAIN_S = 1.0, 0.3
        section = RunSection(patience_s=0.2, hang="end")
        with (stop := StopSignal()), watch.Watchdog(section, Path(sys.argv[1]), Runtime(), print, stop) as one:
            one.begin()
            with page.doing("reward/score"):
                while True:
                    try:
                        threading.Event().wait(60)
                    except BaseException:
                        pass
    """
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-u", "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert ended.returncode == 75
    assert "the controller itself does not react either: its process ends" in ended.stdout
    assert "most recent call first" in ended.stderr and "in <module>" in ended.stderr


# --- in words ---


def test_the_place_in_a_stack_is_the_innermost_that_is_in_no_library():
    ours = Frame(str(module.OURS / "core/workers/scoring.py"), 51, "score")
    library = Frame("/venv/lib/python3.11/site-packages/requests/api.py", 59, "get")
    standard = Frame(threading.__file__, 300, "wait")
    assert place_of(Thread(1, (standard, library, MINE, ours))) is MINE
    assert place_of(Thread(1, (standard, library, ours, MINE))) is ours
    assert place_of(Thread(1, (standard, library))) is standard
    assert place_of(Thread(1, ())) is None


def test_states_are_told_in_words():
    look = doing(0, "save", 3.0, MINE)
    assert "is gone" in described(attrs.evolve(look, state="gone"))
    waits = described(attrs.evolve(look, state="in the system (a disk, say)"))
    assert "is in the system (a disk, say), at save for 3 s, in fetch" in waits
