"""Looks after a run's processes while it runs: tells of those that stand still, and may end them.

    thread "watchdog", every few seconds
      runtime.at_work     the calls that processes work on
      runtime.look        what these do, by their pages, and since when they have not moved
      -> a line: who waits for whom since when, and what those do
      -> run.hang: nothing, or what stands still is killed, or the run ends

Without a call at work it is the controller's own page that counts: under the runtime `inline`, and
where a tracker or a hook hangs.
"""

from __future__ import annotations

import faulthandler
import math
import os
import platform
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.runtime import Label, Process, Runtime
from hybridflow.core.errors import HangError, WorkerDied
from hybridflow.core.job.sections import RunSection
from hybridflow.core.processes import page
from hybridflow.core.processes.look import Frame, Look, Note, Thread
from hybridflow.core.running.folder import StopSignal
from hybridflow.core.values.files import PROCESSES

LOOK_S = 2.0
"""Seconds between two looks, at most; a tenth of run.patience_s where that is less."""
TIMES = 3.0
"""What has stood still, and went on, may stand still for so many times as long."""
START_TIMES = 10.0
"""Before the first step what stands still is ended after so many times run.patience_s alone: a
large model may take long to load."""
LONGEST_S = 3600.0
"""Seconds after which what still stands is told again, at most."""
INTERRUPT_S = 60.0
"""Seconds that the controller may take to end its processes, once it is told to."""
LOST_S = 15.0
"""Seconds that it may take to see by itself that a part of the runtime is gone."""
OURS = Path(page.__file__).parents[2]
"""The folder of this package."""


class Hung(KeyboardInterrupt):
    """Interrupts the controller wherever it is, like Ctrl-C; the watchdog has the error."""


@attrs.define
class _Still:
    """A process that is waited for, and what was seen of it."""

    kind: str
    """What it is about: a role's method, or the first note of its page."""
    since: float
    """When it was first seen at that, by time.monotonic."""
    still_s: float = 0.0
    """For how long it had not moved when it was last seen."""
    excused: bool = False
    """Whether somebody else was the cause: it says nothing of how long such calls take."""
    told_s: float = 0.0
    """Its still_s when it was last told of; 0: it was not."""
    place: tuple[str, int] | None = None


class Watchdog:
    """A thread that looks after the processes of a run, as a context manager.

    It is entered before they start, so that they find the folder of their pages in the environment,
    and left when they have ended.
    """

    def __init__(
        self,
        section: RunSection,
        folder: Path,
        runtime: Runtime,
        say: Callable[[str], None],
        stop: StopSignal,
        step: Callable[[], int] = lambda: 0,
    ):
        """step: the number of completed steps."""
        self.section = section
        self.folder = folder
        self.pages = folder.absolute() / PROCESSES
        self.runtime = runtime
        self.say = say
        self.stop = stop
        self.step = step
        self.begun = False
        """Whether the first step has begun."""
        self._seen: dict[Any, _Still] = {}
        self._longest: dict[str, float] = {}
        """Kind -> the longest time that such a process stood still and then moved."""
        self._error: Exception | None = None
        self._lost_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")
        self._before: str | None = None

    def __enter__(self) -> Watchdog:
        shutil.rmtree(self.pages, ignore_errors=True)  # of a controller that was killed
        page.begin(self.pages, "controller", again=True)
        self._before = os.environ.get(page.FOLDER)
        os.environ[page.FOLDER] = str(self.pages)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        self._thread.join(INTERRUPT_S)
        page.end()
        if self._before is None:
            os.environ.pop(page.FOLDER, None)
        else:
            os.environ[page.FOLDER] = self._before
        shutil.rmtree(self.pages, ignore_errors=True)  # also those of processes that were killed
        if error is not None and self._error is not None:
            raise self._error from error

    # --- looking ---

    def _run(self) -> None:
        every = min(LOOK_S, self.section.patience_s / 10)
        while not self._over.wait(every):
            try:
                self.look()
            except Exception:
                # What goes wrong here is no reason for a run to end.
                self.say(f"the watchdog fails: {traceback.format_exc()}")
                return

    def look(self) -> None:
        """Look once; tell of what stands still, and do what run.hang says."""
        if self._error is not None:
            return
        if (lost := self.runtime.lost()) is not None:
            self._end_if_it_waits(lost)
            return

        now = time.monotonic()
        at_work = list(self.runtime.at_work())
        before, self._seen = self._seen, {}
        if not at_work:
            self._look_here(before, now)
            self._went_on(before)
            return

        for process, label in at_work:
            kind = f"{label.role}/{label.phase}"
            known = before.get((process, label))
            self._seen[process, label] = known or _Still(kind, now)
            before.pop((process, label), None)
        self._went_on(before)

        # Only what is at work for long is looked at: it may be on another machine.
        old = [key for key, one in self._seen.items() if now - one.since > self._limit(one) / 2]
        if not old:
            return
        every = self.runtime.look(self.pages)
        by_place: dict[tuple[str, int] | None, Look] = {look.place: look for look in every}
        still = [key for key in old if self._is_still(key, by_place.get(key[0].place), now)]
        if still:
            self._tell(still)

    def _limit(self, one: _Still) -> float:
        """Return for how long a process may stand still."""
        return max(self.section.patience_s, TIMES * self._longest.get(one.kind, 0.0))

    def _is_still(self, key: tuple[Process, Label], look: Look | None, now: float) -> bool:
        """Note for how long a process has not moved; return whether that is too long."""
        one = self._seen[key]
        at_it = now - one.since
        still_s = at_it if look is None else min(look.still_s, at_it)
        self._moved(one, still_s)
        one.still_s = still_s
        one.place = None if look is None else look.place
        one.excused |= look is not None and bool(look.state)
        return still_s > self._limit(one)

    def _moved(self, one: _Still, still_s: float = 0.0) -> None:
        """Note that a process has gone on, where it has."""
        if still_s >= one.still_s:
            return
        if not one.excused:
            self._longest[one.kind] = max(self._longest.get(one.kind, 0.0), one.still_s)
        if one.told_s:
            self.say(f"{one.kind} goes on, after {one.still_s:.0f} s")
            one.told_s = 0.0

    def _went_on(self, ended: dict[Any, _Still]) -> None:
        """Note what is no longer waited for: its call has ended, or its process."""
        told = [one for one in ended.values() if one.told_s]
        alive = {}
        if told:
            alive = {look.place: look for look in self.runtime.look(self.pages)}
        for one in ended.values():
            look = alive.get(one.place) if one.place else None
            if one in told and (look is None or look.state or one is not told[0]):
                one.told_s = 0.0  # it is gone, or is told of with another rank
            self._moved(one)

    def _look_here(self, before: dict[Any, _Still], now: float) -> None:
        """Look at the controller itself."""
        own = page.own()
        notes = [] if own is None else own.notes
        if own is None or not notes:
            return
        key = "controller"
        one = before.pop(key, None)
        if one is None or one.kind != notes[0].text:
            if one is not None:
                self._went_on({key: one})
            one = _Still(notes[0].text, now, place=(platform.node(), os.getpid()))
        self._seen[key] = one
        still_s = now - own.moved_at
        self._moved(one, still_s)
        one.still_s = still_s
        if still_s > self._limit(one) and still_s > 2 * one.told_s:
            one.told_s = still_s
            look = self._own_look(own, now)
            stopped = [other for other in self.runtime.look(self.pages) if other.state == "stopped"]
            self._conclude(stopped or [look], [look] if stopped else [], one.kind, still_s)

    def _own_look(self, own: page.Page, now: float) -> Look:
        """Return this process, with the stacks of its threads."""
        notes = [
            Note(note.text, now - note.since, note.until - now, note.thread) for note in own.notes
        ]
        threads = []
        for ident, frame in sys._current_frames().items():
            stack = traceback.extract_stack(frame)
            frames = [Frame(one.filename, one.lineno or 0, one.name) for one in reversed(stack)]
            threads.append(Thread(ident, tuple(frames)))
        return Look(
            "controller", os.getpid(), platform.node(), "", 0.0, tuple(notes), tuple(threads)
        )

    # --- telling, and acting ---

    def _tell(self, still: Sequence[tuple[Process, Label]]) -> None:
        """Tell of processes that stand still, each call in a line, unless that was just told."""
        due = [key for key in still if self._due(self._seen[key])]
        if not due:
            return
        every = self.runtime.look(self.pages, stacks=True)
        by_place: dict[tuple[str, int] | None, Look] = {look.place: look for look in every}
        looks = {key: by_place.get(key[0].place) or _not_started(key[0]) for key in still}

        # Those that wait for others are told of, and are not at fault; nor is anybody where these
        # others move.
        waiting = [key for key in still if _waits(looks[key])]
        moving = {_group(process) for process, _ in self._seen.keys() - set(still)}
        if waiting == list(still) and all(_group(process) in moving for process, _ in waiting):
            return

        # One that is stopped is reason enough for all the others. Engines have pages too.
        places = {process.place for process, _ in still}
        at_fault = [look for look in every if look.state == "stopped"]
        if not at_fault:
            at_fault = [looks[key] for key in still if key not in waiting]
            at_fault += [
                look
                for look in every
                if look.place not in places
                and look.name != "controller"
                and look.notes
                and look.still_s > self.section.patience_s
            ]
        peers = {key: looks[key] for key in still if looks[key] not in at_fault}
        for key in still:
            self._seen[key].excused |= key in peers
        for key in due:
            self._seen[key].told_s = self._seen[key].still_s
        kinds = dict.fromkeys(self._seen[key].kind for key in due)
        seconds = max(self._seen[key].still_s for key in due)
        self._conclude(at_fault, list(peers.values()), ", ".join(kinds), seconds)

    def _due(self, one: _Still) -> bool:
        return one.still_s > min(2 * one.told_s, one.told_s + LONGEST_S)

    def _conclude(
        self, at_fault: Sequence[Look], peers: Sequence[Look], kind: str, seconds: float
    ) -> None:
        """Tell who stands still, and do what run.hang says.

        peers: those that wait for others in a collective call.
        """
        looks = at_fault or peers
        limits = [look.notes[-1].left_s for look in looks if look.notes and not look.state]
        by_itself = len(limits) == len(looks) and all(0 < left < math.inf for left in limits)
        early = not self.begun and seconds < START_TIMES * self.section.patience_s
        then = 'It is left alone (run.hang = "say")'
        acts = False
        if self.section.hang != "say" and by_itself:
            then = "It is left to its own limit"
        elif self.section.hang != "say" and early:
            then = "It is left alone for now: a model may take long to load"
        elif self.section.hang == "restart":
            then, acts = 'It is ended now (run.hang = "restart")', True
        elif self.section.hang == "end":
            then, acts = 'The run ends now (run.hang = "end")', True

        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        self.say(
            f"step {self.step() + 1} waits for {kind}, in which nothing has moved since {since} "
            f"({seconds:.0f} s): {_in_words(at_fault, peers)}. {then}. All stacks: hybridflow "
            f"stacks {self.folder}"
        )
        if acts and self.section.hang == "end":
            self._interrupt(
                HangError(
                    f"{_in_words(at_fault, peers)}; the run has ended by run.hang, and --resume "
                    "goes on from its newest checkpoint"
                )
            )
        elif acts:
            self._kill(looks)

    def _kill(self, looks: Sequence[Look]) -> None:
        """End processes, as if they had died; interrupt the controller where it is the only one."""
        here = (platform.node(), os.getpid())
        others = [look for look in looks if look.pid and look.place != here]
        for look in others:
            self.runtime.kill(look.place)
        if not others:
            said = _in_words(looks, [])
            self._interrupt(WorkerDied(said, role="?", phase="?", rank=None))

    def _end_if_it_waits(self, lost: str) -> None:
        """End the run where a part of the runtime is gone, unless the controller notices itself."""
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now - self._lost_since > LOST_S:
            self._interrupt(WorkerDied(lost, role="?", phase="?", rank=None))

    def _interrupt(self, error: Exception) -> None:
        """Raise an error in the controller; end the process where nothing can interrupt it."""
        self._error = error
        if not self.stop.fail(Hung()):
            self.say(f"{error}; the run is in no main thread, so that it cannot be ended from here")
            return
        if self._over.wait(INTERRUPT_S):
            return
        self.say(f"{error}; the controller itself does not react either: its process ends")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def _not_started(process: Process) -> Look:
    return Look(f"rank {process.rank} of pool {process.pool.name!r}", 0, "", "", 0.0)


def _group(process: Process) -> tuple[str, tuple[int, ...]]:
    """Return the torch.distributed group of a process: its pool, and the ranks in it."""
    return process.pool.name, process.pool.members(process.rank)


# --- in words ---


def _in_words(at_fault: Sequence[Look], peers: Sequence[Look]) -> str:
    """Return what processes do, and who waits for them in a collective call."""
    parts = [described(look) for look in at_fault[:4]]
    if len(at_fault) > 4:
        parts.append(f"{len(at_fault) - 4} more")
    if peers:
        names = ", ".join(look.name for look in peers[:4])
        more = f" and {len(peers) - 4} more" if len(peers) > 4 else ""
        verb = "waits" if len(peers) == 1 else "wait"
        for_whom = "other ranks" if not at_fault else "it" if len(at_fault) == 1 else "them"
        parts.append(f"{names}{more} {verb} for {for_whom} ({_collective(peers[0])})")
    return "; ".join(parts)


def described(look: Look) -> str:
    """Return what a process does, in words."""
    if not look.pid:
        return f"{look.name} has not started"
    if look.state == "gone":
        return f"{look.where} is gone"
    if look.state == "stopped":
        return f"{look.where} is stopped (SIGSTOP); kill -CONT {look.pid} lets it go on"
    # Each thread is at the innermost of its notes; a thread of a user's code is often not the main
    # one, which waits for it.
    innermost = {note.thread: note for note in look.notes}
    parts = [f"at {_noted(note, look)}" for note in list(innermost.values())[-3:]]
    if not parts and look.thread is not None and (frame := place_of(look.thread)):
        parts = [f"in {frame.short}"]
    state = [look.state] if look.state else []
    return f"{look.where} is {', '.join([*state, ' and '.join(parts) or 'idle'])}"


def _noted(note: Note, look: Look) -> str:
    """Return a note in words, with the place in the stack of its thread."""
    limit = f", at most {note.left_s:.0f} s more" if 0 < note.left_s < math.inf else ""
    stack = next((thread for thread in look.threads if thread.ident == note.thread), None)
    frame = None if stack is None else place_of(stack)
    where = "" if frame is None else f", in {frame.short}"
    return f"{note.text} for {note.seconds:.0f} s{limit}{where}"


def place_of(thread: Thread) -> Frame | None:
    """Return the place in a stack that says most: the innermost in no library."""
    own = (frame for frame in thread.frames if not _is_library(frame.file))
    return next(own, next(iter(thread.frames), None))


def _is_library(file: str) -> bool:
    if file.startswith(f"{OURS}{os.sep}"):  # which may be installed among libraries
        return False
    return "-packages" in file or file.startswith((os.path.dirname(os.__file__), "<frozen"))


def _waits(look: Look) -> bool:
    """Return whether a process waits for other ranks in a collective call."""
    return not look.state and look.thread is not None and bool(_peers_call(look.thread))


def _peers_call(thread: Thread) -> str:
    """Return the name of the collective call that a thread is in; "": none."""
    calls = [frame.function for frame in thread.frames if "torch/distributed/" in frame.file]
    named = [call for call in calls if call != "wrapper"]  # torch's decorators
    return named[-1] if named else ""


def _collective(look: Look) -> str:
    call = _peers_call(look.thread) if look.thread is not None else ""
    return call or (look.notes[-1].text if look.notes else "a collective call")
