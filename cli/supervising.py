"""`hybridflow run --supervise`: starts a run again, from its newest checkpoint, when it has died.

    supervisor                               the run, a process of its own
    ----------                               -----------------------------
    starts it  ---------------------------->  hybridflow run CONFIG ...
               <----------------------------  begun, checkpoints, signs of life (supervised.py)
    it has died, or makes no sign:
    starts it  ---------------------------->  hybridflow run CONFIG ... --resume
    SIGTERM, Ctrl-C  ---------------------->  the same; its status is this one's too

It reads no config and imports no torch: little of what ends a run can end it too.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hybridflow.cli.statuses import INTERRUPTED, STOPPED
from hybridflow.core.running.supervised import AGAIN, DIED, STOPPING, VARIABLE

TRIES = 5
"""Starts in a row without a checkpoint, after which a run is given up."""
LONGEST_PAUSE_S = 60.0
"""The pause before such a start, at most; it doubles from one second on."""
LOOK_S = 0.5
"""Seconds between two looks at the run."""
HEARD_S = 1.0
"""Seconds in which a run tells that it got a SIGTERM itself: a scheduler may send it to every
process of a job, and a second one would end the run at once."""


def supervise(command: Sequence[str], first: Sequence[str], say: Callable[[str], None]) -> int:
    """Run a command until it has ended by itself; return its exit status.

    first: further arguments of its first start. Later ones have --resume, once a start has begun.
    A run is given up, with DIED, after TRIES starts without a checkpoint.
    """
    more = list(first)
    starts, in_vain, step = 1, 0, ""
    with _signals() as arrived:
        while True:
            start = _Start([*command, *more], arrived, again=starts > 1)
            status = start.wait(say)
            why = start.why
            if why is not None and arrived == [signal.SIGTERM]:
                return STOPPED  # it has died before it could stop: the newest checkpoint stands
            if why is not None and signal.SIGINT in arrived:
                return INTERRUPTED
            if arrived or why is None:
                return status

            step = start.step or step
            in_vain = 0 if start.step else in_vain + 1
            if in_vain == TRIES:
                say(f"supervisor: {why}; it is given up after {TRIES} starts without a checkpoint")
                return DIED
            if start.begun:
                more = ["--resume"]
            starts += 1
            begins = "as at first"
            if more == ["--resume"]:
                begins = f"from the checkpoint of {step}" if step else "from its newest checkpoint"
            say(f"supervisor: {why}; start {starts}, {begins}")
            if in_vain:
                _pause(min(2.0 ** (in_vain - 1), LONGEST_PAUSE_S), arrived)
            if arrived:
                return INTERRUPTED if signal.SIGINT in arrived else STOPPED


class _Start:
    """One start of the run."""

    def __init__(self, command: Sequence[str], arrived: list[int], again: bool):
        """arrived: signals that this process gets, which are passed on."""
        self.begun = False
        """Whether the run has taken its folder."""
        self.step = ""
        """Its newest checkpoint, such as "step 40 of grpo"; "": it has made none."""
        self._stopping = False
        """Whether it knows that it is to end."""
        self._within_s = math.inf
        self._due = math.inf
        """By when it is to be heard again, by time.monotonic."""
        self._arrived = arrived
        self._seen: list[float] = []
        """When each signal was seen here."""
        self._sent = 0
        self._rest = b""
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            # In a group of its own, so that the terminal's Ctrl-C comes here alone.
            self._process = subprocess.Popen(
                command,
                env={**os.environ, VARIABLE: f"{end} {AGAIN}" if again else str(end)},
                pass_fds=(end,),
                process_group=0,
            )
        finally:
            os.close(end)

    @property
    def why(self) -> str | None:
        """Why a run that has ended should be started again; None: it should not."""
        code = self._process.returncode
        if code == DIED:
            return "the run has ended, as something in it has died or stood still"
        if code < 0:
            return f"the run has ended by {signal.Signals(-code).name}"
        return None

    def wait(self, say: Callable[[str], None]) -> int:
        """Wait for the end of the run, and look after it; return its exit status."""
        looked = time.monotonic()
        while self._process.poll() is None:
            self._hear()
            self._pass_on()
            time.sleep(LOOK_S)
            # A machine that sleeps, or a stopped job, stops this process as well.
            now = time.monotonic()
            self._due += max(now - looked - 2 * LOOK_S, 0.0)
            looked = now
            if now > self._due and not select.select([self._pipe], [], [], 0)[0]:
                self._due = math.inf
                self._process.kill()
                say(
                    f"supervisor: the run (pid {self._process.pid}) has made no sign for "
                    f"{self._within_s:.0f} s; it is ended"
                )
        self._hear()
        os.close(self._pipe)
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def _hear(self) -> None:
        """Take what the run has told."""
        try:
            while more := os.read(self._pipe, 65536):
                self._rest += more
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            kind, _, value = line.decode().partition(" ")
            if kind == "begun":
                self.begun = True
            elif kind == "kept":
                self.step = value
            elif kind == STOPPING:
                self._stopping = True
            elif kind == "within":
                self._within_s = float(value)
                self._due = time.monotonic() + self._within_s

    def _pass_on(self) -> None:
        """Send the run what this process has got."""
        now = time.monotonic()
        self._seen += [now] * (len(self._arrived) - len(self._seen))
        while self._sent < len(self._arrived):
            number = self._arrived[self._sent]
            if number == signal.SIGTERM and self._sent == 0:
                if not self._stopping and now - self._seen[0] < HEARD_S:
                    return
                if self._stopping:
                    self._sent += 1
                    continue
            self._process.send_signal(number)
            self._sent += 1


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for an end, while the body runs."""
    arrived: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        # A closed terminal is no reason to lose a step; it often comes beside another signal.
        if number == signal.SIGHUP and not arrived:
            number = signal.SIGTERM
        if number != signal.SIGHUP:
            arrived.append(number)

    # What is ignored (by nohup, say) stays so.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pause(seconds: float, arrived: list[int]) -> None:
    """Wait, unless a signal arrives."""
    until = time.monotonic() + seconds
    while not arrived and time.monotonic() < until:
        time.sleep(min(LOOK_S, seconds))
