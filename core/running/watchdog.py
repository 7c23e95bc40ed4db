"""Looks after a run's processes while it runs: tells of those that stand still, and may end them.

    thread "watchdog", every few seconds
      runtime.at_work     the calls that processes work on
      runtime.look        what these do, by their pages, and since when they have not moved
      -> a line: who waits for whom since when, and what those do
      -> run.hang: nothing, or what stands still is killed, or the run ends

Without a call at work it is the controller's own page that counts: under the runtime `inline`, and
where a tracker or a hook hangs. Before the first step only what is stopped is ended, and nothing
once the run leaves its loop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.contracts.runtime import Label, Process, Runtime
from hybridflow.core.errors import HangError, WorkerDied
from hybridflow.core.job.sections import RunSection
from hybridflow.core.processes import page
from hybridflow.core.processes.look import (
    ANSWER_S,
    Frame,
    Look,
    Note,
    Thread,
    end_stopped,
    here,
)
from hybridflow.core.running import supervised
from hybridflow.core.running.folder import StopSignal
from hybridflow.core.values.files import PROCESSES

LOOK_S = 2.0
"""Seconds between two looks, at most; a tenth of run.patience_s where that is less. A look that
takes long, on a large cluster, is followed by ten times as long without one."""
TIMES = 3.0
"""What has stood still, and went on, may stand still for so many times as long."""
LONGEST_S = 3600.0
"""Seconds after which what still stands is told again, at most."""
INTERRUPT_S = 60.0
"""Seconds that the controller may take to leave what it does, once it is told to; it is told again
every AGAIN_S."""
AGAIN_S = 5.0
LOST_S = 15.0
"""Seconds that it may take to see by itself that a part of the runtime is gone."""
OURS = Path(page.__file__).parents[2]
"""The folder of this package."""

Key = tuple[Process, Label]
Places = dict[tuple[str, int] | None, Look]


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
    note: str = ""
    """The innermost note of its page when it was last seen, without numbers."""
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
    ):
        self.section = section
        self.folder = folder
        self.pages = folder.absolute() / PROCESSES
        self.runtime = runtime
        self.stop = stop
        self.step: Callable[[], int] = lambda: 0
        """The number of completed steps."""
        self._told = say
        self._acts = True
        """Whether anything may be ended."""
        self._begun = False
        """Whether the first step has begun; before, a model may be loaded for long."""
        self._acting = threading.Lock()
        self._seen: dict[Any, _Still] = {}
        self._longest: dict[tuple[str, str], float] = {}
        """(kind, note) -> the longest time that such a process stood still and then moved."""
        self._killed: set[tuple[str, int]] = set()
        self._interruption: tuple[Hung, Exception] | None = None
        """What was raised in the main thread, and the error that it stands for."""
        self._lost_since: float | None = None
        self._took_s = 0.0
        """How long it took to look at all processes."""
        self._failed: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")
        self._signs = threading.Thread(target=self._sign, daemon=True, name="signs")
        self._before: str | None = None

    def __enter__(self) -> Watchdog:
        self._remove_pages()  # of a controller that was killed
        page.begin(self.pages, "controller", again=True)
        self._before = os.environ.get(page.FOLDER)
        os.environ[page.FOLDER] = str(self.pages)
        self._thread.start()
        self._signs.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._leave()
        page.end()
        if self._before is None:
            os.environ.pop(page.FOLDER, None)
        else:
            os.environ[page.FOLDER] = self._before
        self._remove_pages()  # also those of processes that were killed
        if self._interruption is not None and self._interruption[0] in _chain(error):
            raise self._interruption[1] from error

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Leave the run's processes alone after the body, when they are ended."""
        try:
            yield
        finally:
            self._leave()

    def _remove_pages(self) -> None:
        """Remove the pages of a run that has ended; end those of its processes that are stopped.

        All others see its end, and end by themselves.
        """
        end_stopped(self.pages)
        shutil.rmtree(self.pages, ignore_errors=True)

    def begin(self) -> None:
        """From now on what stands still may be ended: the first step begins."""
        self._begun = True

    def _leave(self) -> None:
        """End the thread: from here on nothing is ended, and the runtime may be."""
        with self._acting:
            self._acts = False
        self._over.set()
        self._thread.join(2 * ANSWER_S)

    def say(self, text: str) -> None:
        """Tell the user, if that can be done: a full disk must not keep this thread from acting."""
        with contextlib.suppress(Exception, SystemExit):
            self._told(text)

    # --- looking ---

    def _run(self) -> None:
        every = min(LOOK_S, self.section.patience_s / 10)
        while not self._over.wait(max(every, 10 * self._took_s)):
            self._took_s = 0.0
            try:
                self.look()
            except Exception as error:
                # What goes wrong here is no reason for a run to end, nor to look no more.
                if (text := f"{type(error).__name__}: {error}") not in self._failed:
                    self._failed.add(text)
                    self.say(f"the watchdog could not look: {traceback.format_exc()}")

    def _sign(self) -> None:
        """Tell the supervisor again and again that this process goes on. Runs in a thread."""
        within = math.inf if self.section.hang == "say" else self.section.patience_s
        while not self._over.wait(min(LOOK_S, self.section.patience_s / 10)):
            supervised.tell(f"within {within}")
            if supervised.lost():
                self.stop.ask()
                break
        supervised.tell(f"within {math.inf}")

    def look(self) -> None:
        """Look once; tell of what stands still, and do what run.hang says."""
        now = time.monotonic()
        if (lost := self.runtime.lost()) is not None:
            self._end_if_it_waits(lost, now)
            return

        at_work = list(self.runtime.at_work())
        before, self._seen = self._seen, {}
        if not at_work:
            self._look_here(before, now)
            self._ended(before)
            return

        for process, label in at_work:
            kind = f"{label.role}/{label.phase}"
            self._seen[process, label] = before.pop((process, label), _Still(kind, now))
        self._ended(before)

        # Only what is at work for long is looked at: it may be on another machine.
        old = [key for key, one in self._seen.items() if now - one.since > self._limit(one) / 2]
        if not old:
            return
        places = self._places()
        still = [key for key in old if self._is_still(key, places.get(key[0].place), now)]
        # Its peers in the same call may wait for one that moves.
        moving = {(_group(process), label) for process, label in self._seen.keys() - set(still)}
        still = [key for key in still if (_group(key[0]), key[1]) not in moving]
        if any(self._due(self._seen[key]) for key in still):
            self._tell(still)

    def _places(self, stacks: bool = False) -> Places:
        began = time.monotonic()
        found: Places = {look.place: look for look in self.runtime.look(self.pages, stacks)}
        if not stacks:
            self._took_s = time.monotonic() - began
        return found

    def _limit(self, one: _Still) -> float:
        """Return for how long a process may stand still."""
        longest = self._longest.get((one.kind, one.note), 0.0)
        return max(self.section.patience_s, TIMES * longest)

    def _is_still(self, key: Key, look: Look | None, now: float) -> bool:
        """Note for how long a process has not moved; return whether that is too long."""
        one = self._seen[key]
        at_it = now - one.since
        still_s = at_it if look is None else min(look.still_s, at_it)
        if still_s < one.still_s:
            self._went_on(one)
        one.still_s = still_s
        one.place = None if look is None else look.place
        one.note = _kind(look.present[-1].text) if look is not None and look.present else ""
        one.excused |= look is not None and look.state == "stopped"
        return still_s > self._limit(one)

    def _went_on(self, one: _Still) -> None:
        """Note that a process has moved after it stood still."""
        if not one.excused:
            key = one.kind, one.note
            self._longest[key] = max(self._longest.get(key, 0.0), one.still_s)
        if one.told_s:
            self.say(f"{one.kind} goes on, after {one.still_s:.0f} s")
            one.told_s = 0.0

    def _ended(self, ended: Mapping[Any, _Still]) -> None:
        """Learn from what is no longer waited for, where its process has not ended."""
        long = [one for one in ended.values() if TIMES * one.still_s > self.section.patience_s]
        places = self._places() if long else {}
        told = set()
        for one in long:
            look = places.get(one.place)
            if look is None or look.state or look.place in self._killed:
                continue
            if one.kind in told:
                one.told_s = 0.0  # once for all ranks of a call
            told.add(one.kind)
            self._went_on(one)

    def _look_here(self, before: dict[Any, _Still], now: float) -> None:
        """Look at the controller itself."""
        own = page.own()
        notes = [] if own is None else own.notes
        if own is None or not notes:
            return
        kind = _kind(notes[0].text)
        one = before.pop("controller", None)
        if one is None or one.kind != kind:
            # For the first time: the call that it waited for may have ended a moment ago.
            one = _Still(kind, now, place=(here(), os.getpid()))
        self._seen["controller"] = one
        moved_at = own.moved_at
        still_s = min(now - moved_at, now - one.since)
        if still_s < one.still_s:
            self._went_on(one)
        one.still_s = still_s
        one.note = _kind(notes[-1].text)
        if still_s <= self._limit(one) or not self._due(one):
            return
        one.told_s = still_s
        look = self._own_look(own, now)
        stopped = [other for other in self._places().values() if other.state == "stopped"]
        at_fault, peers = (stopped, [look]) if stopped else ([look], [])
        one.excused |= bool(stopped)
        about = notes[0].text.removeprefix("waits for ")
        self._conclude(at_fault, peers, [look], about, still_s, lambda: own.moved_at == moved_at)

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
            "controller", os.getpid(), here(), "", 0.0, tuple(notes), threads=tuple(threads)
        )

    # --- telling, and acting ---

    def _tell(self, still: Sequence[Key]) -> None:
        """Tell of processes that stand still, and end them by setting."""
        places = self._places(stacks=True)
        looks = {key: places.get(key[0].place) or _unseen(key[0]) for key in still}

        # Those that wait for others are told of, and are not at fault: for one that is stopped, for
        # their engine, for other ranks.
        at_fault = [look for look in places.values() if look.state == "stopped"]
        if not at_fault:
            blamed = [look for look in looks.values() if not _waits(look)]
            engines = [
                look
                for look in places.values()
                if any((look.host, look.parent) == rank.place for rank in blamed)
                and look.present
                and not look.state
                and look.still_s > self.section.patience_s
            ]
            held_up = {(engine.host, engine.parent) for engine in engines}
            at_fault = [look for look in blamed if look.place not in held_up] + engines
        peers = [look for look in looks.values() if look not in at_fault]
        for key in still:
            self._seen[key].excused |= looks[key] in peers
            self._seen[key].told_s = self._seen[key].still_s

        kinds = ", ".join(dict.fromkeys(self._seen[key].kind for key in still))
        seconds = max(self._seen[key].still_s for key in still)

        def holds() -> bool:
            return self._still_stand(looks)

        self._conclude(at_fault, peers, list(looks.values()), kinds, seconds, holds)

    def _still_stand(self, looks: Mapping[Key, Look]) -> bool:
        """Return whether none of these has moved since it was looked at, nor has its call ended."""
        at_work = set(self.runtime.at_work())
        places = self._places()
        for key, before in looks.items():
            look = places.get(key[0].place)
            if key not in at_work or (look is not None and look.still_s < before.still_s):
                return False
        return True

    def _due(self, one: _Still) -> bool:
        return one.still_s > min(2 * one.told_s, one.told_s + LONGEST_S)

    def _conclude(
        self,
        at_fault: Sequence[Look],
        peers: Sequence[Look],
        waited_for: Sequence[Look],
        kind: str,
        seconds: float,
        holds: Callable[[], bool],
    ) -> None:
        """Tell who stands still, and do what run.hang says.

        peers: those that wait for others. waited_for: the processes that the controller waits for.
        holds: whether it is still so: the stacks took a while.
        """
        if not holds():
            return
        hang = self.section.hang
        limits = [look.present[-1].left_s for look in waited_for if look.present]
        stopped = any(look.state == "stopped" for look in at_fault)
        by_itself = len(limits) == len(waited_for) and all(left < math.inf for left in limits)
        acts = False
        then = 'It is left alone (run.hang = "say")'
        if hang != "say":
            if not self._begun and not stopped:
                then = "It is left alone before the first step"
            elif by_itself and not stopped:
                then = "It is left to its own limit"
            elif not all(look.pid for look in waited_for):
                then = "It is left alone, as it does not say what it does"
            else:
                acts = True
                what = "It is ended" if hang == "restart" else "The run ends"
                then = f'{what} now (run.hang = "{hang}")'

        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        said = _in_words(at_fault, peers)
        self.say(
            f"step {self.step() + 1} waits for {kind}, in which nothing has moved since {since} "
            f"({seconds:.0f} s): {said}. {then}. All stacks: hybridflow stacks {self.folder}"
        )
        with self._acting:
            if acts and self._acts:
                self._act(at_fault or peers, said)

    def _act(self, looks: Sequence[Look], said: str) -> None:
        """End processes as if they had died, or the run; called with `_acting`."""
        if self.section.hang == "end":
            text = "the run has ended by run.hang, and --resume goes on from its newest checkpoint"
            self._interrupt(HangError(f"{said}; {text}"))
            return
        others = [look for look in looks if look.place != (here(), os.getpid())]
        for look in others:
            self._killed.add(look.place)
            self.runtime.kill(look)
        if not others:  # the controller is the only one
            self._interrupt(WorkerDied(said, role="?", phase="?", rank=None))

    def _end_if_it_waits(self, lost: str, now: float) -> None:
        """End the run where a part of the runtime is gone, unless the controller notices itself."""
        self._lost_since = self._lost_since or now
        with self._acting:
            if self._acts and now - self._lost_since > LOST_S and self._interruption is None:
                self._interrupt(WorkerDied(lost, role="?", phase="?", rank=None))

    def _interrupt(self, error: Exception) -> None:
        """Raise an error in the controller; called with `_acting`."""
        hung = Hung()
        if not self.stop.fail(hung):
            self.say(f"{error}; the run is in no main thread, so that it cannot be ended from here")
            return
        self._interruption = (hung, error)
        threading.Thread(target=self._insist, args=(hung, error), daemon=True).start()

    def _insist(self, hung: Hung, error: Exception) -> None:
        """Interrupt again and again; end the process where nothing can interrupt it."""
        own = page.own()
        moved_at = None if own is None else own.moved_at
        deadline = time.monotonic() + INTERRUPT_S
        while not self._over.wait(min(AGAIN_S, INTERRUPT_S)):
            if own is not None and own.moved_at != moved_at:
                self.say(f"{error}; yet it goes on: something has taken the interruption")
                self._interruption = None
                return
            if time.monotonic() < deadline:
                with self._acting:
                    if self._acts:
                        self.stop.fail(hung)
                continue
            self.say(f"{error}; the controller itself does not react either: its process ends")
            faulthandler.dump_traceback(all_threads=True)
            os._exit(supervised.DIED)


def _kind(text: str) -> str:
    """Return a note without its numbers: which step or row it is makes no other kind."""
    return re.sub(r"\d+", "N", text)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those in whose course it came."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unseen(process: Process) -> Look:
    """Return what is known of a process that does not say what it does."""
    name = f"rank {process.rank} of pool {process.pool.name!r}"
    if process.place is None:
        return Look(name, 0, "", "", 0.0)
    host, pid = process.place
    return Look(f"{name} (pid {pid} on {host})", 0, host, "", 0.0)


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
        about = _collective(peers[0]) or (peers[0].present[-1].text if peers[0].present else "")
        parts.append(f"{names}{more} {verb} for {for_whom}{f' ({about})' if about else ''}")
    return "; ".join(parts)


def described(look: Look) -> str:
    """Return what a process does, in words."""
    if not look.pid:
        return f"{look.name} {'says nothing of what it does' if look.host else 'has not started'}"
    if look.state == "gone":
        return f"{look.where} is gone"
    if look.state == "stopped":
        return f"{look.where} is stopped (SIGSTOP); kill -CONT {look.pid} lets it go on"
    # Each thread is at the innermost of its notes; a thread of a user's code is often not the main
    # one, which waits for it.
    innermost = {note.thread: note for note in look.present}
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
    """Return whether a process waits for other ranks, in a collective call say."""
    if look.state == "stopped" or not look.present:
        return False
    return look.present[-1].text == page.PEERS or bool(_collective(look))


def _collective(look: Look) -> str:
    """Return the name of the collective call that a process is in; "": none."""
    frames = () if look.thread is None else look.thread.frames
    calls = [frame.function for frame in frames if "torch/distributed/" in frame.file]
    named = [call for call in calls if call != "wrapper"]  # torch's decorators
    return named[-1] if named else ""
