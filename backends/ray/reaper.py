"""Ends what remains of a local Ray when its controller has ended.

The controller starts `python reaper.py FOLDER` before Ray, and holds the other end of this
process's standard input: when the controller ends in any way, that pipe closes. Without the reaper,
Ray's own agents would try for a minute to report to a head that has ended too, and engines that Ray
kills would leave their temporary files.

    controller runs   remember Ray's processes, and those that they start
    pipe closes       ask Ray's processes to end, and give all of them GRACE_S seconds; or kill them
                      at once where BROKEN was written: without a gcs they would wait for it
    then              kill those that remain, and remove the folder of the ranks

They have the folder in their environment as MARK, or a parent that has. They must be remembered: an
agent changes its title, which may wipe the mark away, and outlives its parent.

This module imports nothing but the standard library, to start quickly.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "HYBRIDFLOW_SCRATCH"
"""A variable of the environment of all processes of a local Ray: the folder of its ranks, where
engines put their temporary files (kit/hosting/process.py)."""
BROKEN = b"!"
"""What the controller writes before it ends, where its Ray has lost a process."""
LOOKS_S = (0.5, 10.0)
"""Seconds between the first two scans of the processes, and the longest time between two."""
GRACE_S = 8.0
"""Seconds that the processes may take to end."""
REMOVAL_S = 5.0
"""Seconds for which a process that is ending may still write into the folder."""

Processes = dict[int, str]
"""Process -> its start, field 22 of /proc/PID/stat: a number may be used again."""


def running() -> dict[int, tuple[int, str]]:
    """Map each process to its parent and its start; zombies are left out."""
    found = {}
    for folder in Path("/proc").iterdir():
        # Folders that are no process, and processes that end meanwhile, are passed over.
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Behind the name, which may contain spaces: state, parent, ..., start at 19.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(folder.name)] = (int(fields[1]), fields[19])
    return found


def marked(pid: int, folder: str) -> bool:
    """Return whether a process has the mark of this folder in its environment."""
    with contextlib.suppress(OSError):
        return f"{MARK}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def remaining(folder: str, known: Processes) -> Processes:
    """Return the processes of the local Ray with this folder: those of `known`, and new ones."""
    processes = running()
    ours = {
        pid
        for pid, (_, start) in processes.items()
        if known.get(pid) == start or marked(pid, folder)
    }
    # Children of theirs, and children of those.
    new = ours
    while new:
        new = {pid for pid, (parent, _) in processes.items() if parent in new} - ours
        ours = ours | new
    return {pid: processes[pid][1] for pid in ours}


def of_ray(pid: int) -> bool:
    """Return whether a process is one of Ray's own, as ranks are, and not started by a rank."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.startswith(b"ray::") or b"/ray/" in command
    return False


def end(folder: str, known: Processes, number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to the processes of a local Ray, and kill those that do not end.

    What a rank has started, as an engine, sees that the rank is gone, and tidies up by itself.
    """
    known = remaining(folder, known)
    send(number, filter(of_ray, known))
    deadline = time.monotonic() + GRACE_S
    while (known := remaining(folder, known)) and time.monotonic() < deadline:
        time.sleep(0.1)
    send(signal.SIGKILL, known)


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def remove(folder: str) -> None:
    """Remove a folder into which processes that are ending may still write."""
    deadline = time.monotonic() + REMOVAL_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def main(folder: str) -> None:
    """Wait until the controller has ended; then end its Ray, and remove `folder`."""
    known: Processes = {}
    number = signal.SIGTERM
    wait_s, longest_s = LOOKS_S
    while True:
        known = remaining(folder, known)
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        if ready:
            if not os.read(sys.stdin.fileno(), 1):  # end of file: the controller has ended
                break
            number = signal.SIGKILL  # it has said that its Ray is broken
        wait_s = min(1.5 * wait_s, longest_s)
    end(folder, known, number)
    remove(folder)


if __name__ == "__main__":
    # Ctrl-C in the terminal must not end it before the controller.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main(sys.argv[1])
