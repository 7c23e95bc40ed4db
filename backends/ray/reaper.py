"""Ends what a local Ray leaves when its controller is killed: `python reaper.py CONTROLLER`, started beside it.

Ray's own agents then try for a minute to report to a head that is gone too. The controller holds the other end of this
process' standard input: it is closed however the controller ends. Imports nothing but Python's own, to start quickly.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

LOOK_S = 2.0
GRACE_S = 8.0
"""What Ray may take to end by itself."""


def children() -> dict[int, list[tuple[int, str, str]]]:
    """Parent -> (pid, when it started, command) of every process."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            if fields[0] != "Z":
                found.setdefault(int(fields[1]), []).append((int(folder.name), fields[19], command))
    return found


def of_ray(controller: int) -> set[tuple[int, str]]:
    """(pid, when it started) of the raylet, the head and their children."""
    every = children()
    servers = [c for c in every.get(controller, ()) if "/raylet" in c[2] or "gcs_server" in c[2]]
    return {
        (pid, began) for server in servers for pid, began, _ in (server, *every.get(server[0], ()))
    }


def living(known: set[tuple[int, str]]) -> set[tuple[int, str]]:
    return known & {(pid, began) for group in children().values() for pid, began, _ in group}


def main(controller: int) -> None:
    known: set[tuple[int, str]] = set()
    while True:
        known |= of_ray(controller)
        ready, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if ready and not os.read(sys.stdin.fileno(), 1):
            break
        known = living(known)
    deadline = time.monotonic() + GRACE_S
    while living(known) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid, _ in living(known):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the controller
    main(int(sys.argv[1]))
