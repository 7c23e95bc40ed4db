"""Tells the supervisor of this process, `hybridflow run --supervise`, how the run goes on.

Each message is a line in a pipe:

    begun         the folder is this run's, and what was to be replaced in it is gone
    kept step 40  the checkpoint of a step is complete, of a stage: step 40 of grpo
    stopping      SIGTERM has arrived
    within 120    this process will be heard again within so many seconds; "inf": at any time

Without a supervisor nothing is told.
"""

from __future__ import annotations

import os

VARIABLE = "HYBRIDFLOW_SUPERVISOR"
"""The variable of the environment that has the descriptor of the pipe, and AGAIN."""
STOPPING = "stopping"
"""The message of a run that has taken a SIGTERM."""
AGAIN = "again"
"""Says that the same supervisor has begun this run before."""
DIED = 75
"""The exit status of what has died or stood still, so that --resume may go on (sysexits'
EX_TEMPFAIL); a supervisor does that by itself."""

_pipe: int | None = None
_again = False
_lost = False
_stopping = False


def begin() -> None:
    """Take the pipe from the environment: it is not for the processes of the run."""
    global _pipe, _again, _lost, _stopping
    _lost = _stopping = False
    number, _, again = os.environ.pop(VARIABLE, "").partition(" ")
    if number:
        _pipe = int(number)
        _again = again == AGAIN
        os.set_inheritable(_pipe, False)
        os.set_blocking(_pipe, False)  # a supervisor that is stopped must not hold up the run


def again() -> bool:
    """Return whether what the run's folder has is of this supervisor's starts before."""
    return _again


def stopping() -> bool:
    """Return whether a run of this process has taken a SIGTERM."""
    return _stopping


def tell(message: str) -> None:
    """Tell the supervisor, if there is one; also called by handlers of signals."""
    global _pipe, _lost, _stopping
    _stopping |= message == STOPPING
    pipe = _pipe
    if pipe is None:
        return
    try:
        os.write(pipe, f"{message}\n".encode())  # such short lines are not mixed in a pipe
    except BlockingIOError:
        pass
    except OSError:
        _pipe = None
        _lost = True


def lost() -> bool:
    """Return whether the supervisor has ended; the run is to end as by SIGTERM then."""
    return _lost
