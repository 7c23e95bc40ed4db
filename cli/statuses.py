"""The exit statuses of commands."""

from __future__ import annotations

from hybridflow.core.errors import HangError, HybridFlowError, WorkerDied
from hybridflow.core.running.supervised import DIED

ERROR = 1
"""It would happen again: something is to be mended first."""
STOPPED = 99
"""A run was told to stop and goes on with --resume. Grid Engine queues such jobs again by itself,
other schedulers where they are told to."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128 and the signal's number."""


def status_of(error: HybridFlowError) -> int:
    """Return the exit status of a command that an error has ended."""
    return DIED if isinstance(error, WorkerDied | HangError) else ERROR
