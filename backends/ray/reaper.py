"""Ends what remains of a local Ray when its controller has ended.

The controller starts `python reaper.py FOLDER` before Ray, and holds the other end of this
process's standard input: when the controller ends in any way, that pipe closes. Without the reaper,
Ray's own agents would try for a minute to report to a head that has ended too, and engines that Ray
kills would leave their temporary files.

    controller runs   wait
    pipe closes       ask Ray's processes to end, and give all that they started GRACE_S seconds
    then              kill those that remain, and remove the folder of the ranks

Ray's processes, and whatever they have started, have the folder in their environment as MARK.

This module imports nothing but the standard library, to start quickly.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "HYBRIDFLOW_SCRATCH"
"""A variable of the environment of all processes of a local Ray: the folder of its ranks, where
engines put their temporary files (kit/hosting/process.py)."""
GRACE_S = 8.0
"""Seconds that the processes may take to end."""
REMOVAL_S = 5.0
"""Seconds for which a process that is ending may still write into the folder."""


def remaining(folder: str) -> set[int]:
    """Return the processes of the local Ray whose ranks' folder it is, without zombies."""
    mark = f"{MARK}={folder}".encode()
    found = set()
    for process in Path("/proc").iterdir():
        # Folders that are no process, those of other users, and processes that end meanwhile. A
        # zombie's environment is empty.
        with contextlib.suppress(OSError, ValueError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
    return found


def of_ray(pid: int) -> bool:
    """Return whether a process is one of Ray's own, as ranks are, and not started by a rank."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.startswith(b"ray::") or b"/ray/" in command
    return False


def end(folder: str) -> None:
    """Have the processes of a local Ray end, and kill those that do not.

    What a rank has started, as an engine, sees that the rank is gone, and tidies up by itself.
    """
    send(signal.SIGTERM, {pid for pid in remaining(folder) if of_ray(pid)})
    deadline = time.monotonic() + GRACE_S
    while (pids := remaining(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    send(signal.SIGKILL, pids)


def send(number: signal.Signals, pids: set[int]) -> None:
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
    while os.read(sys.stdin.fileno(), 1):
        pass
    end(folder)
    remove(folder)


if __name__ == "__main__":
    # Ctrl-C in the terminal must not end it before the controller.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main(sys.argv[1])
