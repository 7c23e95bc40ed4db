"""Ends the processes of a local Ray that remain when its controller is killed.

The controller starts `python reaper.py CONTROLLER_PID FOLDER` beside Ray, and holds the other end
of this process's standard input: when the controller ends in any way, that pipe closes. Without the
reaper, Ray's own agents would try for a minute to report to a head that has ended too.

    controller runs   remember the raylet, the head (gcs_server) and their children
    pipe closes       give them GRACE_S seconds to end by themselves
    then              kill those that remain, and remove the folder where the ranks met

This module imports nothing but the standard library, to start quickly.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

LOOK_S = 2.0
"""Seconds between two scans of the processes."""
GRACE_S = 8.0
"""Seconds that Ray may take to end by itself."""


def children() -> dict[int, list[tuple[int, str, str]]]:
    """Map each parent's pid to the (pid, start time, command) of its children.

    A pid may be used again, so a process is identified by its pid and start time: field 22 of
    /proc/PID/stat, in clock ticks since boot. Zombies are left out.
    """
    children_of: dict[int, list[tuple[int, str, str]]] = {}
    for folder in Path("/proc").iterdir():
        # Folders that are no process, and processes that end meanwhile, are passed over.
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Behind the name, which may contain spaces: state, parent, ..., start time at 19.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            arguments = (folder / "cmdline").read_bytes()
            command = arguments.replace(b"\0", b" ").decode(errors="replace")
            if fields[0] != "Z":
                siblings = children_of.setdefault(int(fields[1]), [])
                siblings.append((int(folder.name), fields[19], command))
    return children_of


def of_ray(controller: int) -> set[tuple[int, str]]:
    """Return (pid, start time) of the controller's raylet and head, and of their children."""
    children_of = children()
    processes = set()
    for pid, start_time, command in children_of.get(controller, ()):
        if "/raylet" in command or "gcs_server" in command:
            processes.add((pid, start_time))
            processes |= {(child, start) for child, start, _ in children_of.get(pid, ())}
    return processes


def living(known: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Return those of the known processes that still run."""
    running = set()
    for siblings in children().values():
        running |= {(pid, start_time) for pid, start_time, _ in siblings}
    return known & running


def main(controller: int, folder: str) -> None:
    """Watch Ray's processes until the controller ends, then end them too, and remove `folder`."""
    known: set[tuple[int, str]] = set()
    while True:
        known |= of_ray(controller)
        ready, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if ready and not os.read(sys.stdin.fileno(), 1):  # end of file: the controller has ended
            break
        known = living(known)

    # The controller has ended: a Ray that was shut down, or can do so, ends by itself.
    deadline = time.monotonic() + GRACE_S
    while living(known) and time.monotonic() < deadline:
        time.sleep(0.2)

    for pid, _ in living(known):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # Ctrl-C in the terminal must not end it before the controller.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main(int(sys.argv[1]), sys.argv[2])
