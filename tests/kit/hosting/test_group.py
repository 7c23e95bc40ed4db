"""A process group ends whole, with what it has under /dev/shm, and whoever is not of it stays."""

import subprocess
import sys
import time
import uuid
from pathlib import Path

from hybridflow.kit.hosting.group import end_group, members

CODE = """
import mmap, os, subprocess, sys, time
from multiprocessing import get_context
name = sys.argv[1]
lock = get_context("spawn").Lock()  # a semaphore with a name, and a resource tracker
file = open(f"/dev/shm/{name}", "wb+"); file.truncate(4096); kept = mmap.mmap(file.fileno(), 4096)
open(f"/dev/shm/{name}_{os.getpid()}_x", "wb").close()
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) for _ in range(2)]
print("ready", lock._semlock.name.lstrip("/"), flush=True)
time.sleep(100)
"""


def test_it_ends_with_its_children_its_files_and_its_semaphores():
    before = {p.name for p in Path("/dev/shm").iterdir()}
    name, other = uuid.uuid4().hex, Path("/dev/shm") / uuid.uuid4().hex
    other.write_bytes(b"of somebody else")
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, name],
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert process.stdout is not None
        ready, lock = process.stdout.readline().split()
        assert ready == "ready" and len(members(process.pid)) == 4
        theirs = {name, f"{name}_{process.pid}_x", f"sem.{lock}"}
        assert {p.name for p in Path("/dev/shm").iterdir()} - before >= theirs | {other.name}
        end_group(process.pid)
        process.wait(5)
        process.stdout.close()
        assert members(process.pid) == set()
        left = {p.name for p in Path("/dev/shm").iterdir()} - before
        assert other.name in left and not any(name in entry for entry in left)
        assert not left & theirs
    finally:
        other.unlink()


def test_one_of_the_group_has_it_ended_from_outside():
    code = (
        "import subprocess, sys, time\n"
        "from hybridflow.kit.hosting.group import end_own_group\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('ready', flush=True)\nend_own_group()\n"
        "while True: subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); time.sleep(0.005)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.wait(20)
    deadline = time.monotonic() + 10
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(process.pid) == set() and process.returncode == -9


def test_an_empty_group_is_no_error():
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    end_group(process.pid)
