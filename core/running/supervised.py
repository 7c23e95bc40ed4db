"""Tells the supervisor of this process, `hybridflow run --supervise`, how the run goes on.

Each message is a line in a pipe:

    begun         the folder is this run's, and what was to be replaced in it is gone
    kept step 40  the checkpoint of a step is complete, of a stage: step 40 of grpo
    stopping      SIGTERM has arrived
    within 120    this process will be heard again within so many seconds; "inf": at any time

A run that has lost its supervisor ends as by SIGTERM. Without one nothing is told.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "HYBRIDFLOW_SUPERVISOR"
"""The variable of the environment that has the descriptor of the pipe."""

_pipe: int | None = None


def begin() -> None:
    """Take the pipe from the environment: it is not for the processes of the run."""
    global _pipe
    number = os.environ.pop(VARIABLE, None)
    if number is not None:
        _pipe = int(number)
        os.set_inheritable(_pipe, False)
        os.set_blocking(_pipe, False)  # a supervisor that is stopped must not hold up the run


def tell(message: str) -> None:
    """Tell the supervisor, if there is one; also called by a handler of a signal."""
    global _pipe
    if _pipe is None:
        return
    try:
        os.write(_pipe, f"{message}\n".encode())  # such short lines are not mixed in a pipe
    except BlockingIOError:
        pass
    except OSError:
        _pipe = None
        os.kill(os.getpid(), signal.SIGTERM)
