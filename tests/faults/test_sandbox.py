"""Programs that attack the sandbox get nothing, end at their limits, and leave nothing."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.attacks import attacks
from helpers.canaries import canaries
from helpers.paths import EVERY
from helpers.programs import run
from helpers.waiting import eventually

from hybridflow.backends.rewards.code import CodeReward
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.kit.sandbox import jail, process, programs
from hybridflow.kit.sandbox.process import Limits
from hybridflow.kit.sandbox.programs import run_program
from hybridflow.kit.sandbox.session import Sandbox


@pytest.fixture
def canary(tmp_path):
    with canaries(tmp_path) as made:
        yield made


SIGNALS = """
import os, signal, time
if os.fork() == 0:
    os.close(1), os.close(2)
    while True:
        with open("beat", "w") as file:
            file.write(str(time.monotonic()))
        time.sleep(0.02)
while not os.path.exists("beat"):
    time.sleep(0.02)
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
    time.sleep(0.005)
os.write(1, b"sent\\n")
"""
"""Sends every signal to process 1, and leaves a process that writes."""
TRIES = """
import socket
for address in (("127.0.0.1", 8000), ("127.0.0.1", 8001), ("127.0.0.2", 8000)):
    print(socket.socket().connect_ex(address), end=" ")
"""
"""What connecting to the door, to other addresses returns (errno)."""


def left_behind() -> list[str]:
    """Processes of programs, and of their places: those below the jails of this process."""
    return [child for one in process._idle for child in jail.below(one.pid)]


def test_f10_two_hundred_attacks_get_nothing_and_end_no_run(canary):
    assert run("pass").good
    tried = attacks(canary)
    assert len(tried) >= 200 and len({attack.name for attack in tried}) == len(tried)
    tried = tried if EVERY else tried[::4]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda attack: run_program(attack.program, "", attack.limits), tried))
    got = {
        attack.name: end for attack, end in zip(tried, ends, strict=True) if not attack.right(end)
    }
    assert got == {}
    eventually(lambda: not left_behind())
    assert run("print(7)").output == "7\n"


def test_attacks_get_at_the_canaries_where_nothing_holds_them_back(canary):
    """What the attacks on the sandbox are worth: without it they succeed."""
    tried = [attack for attack in attacks(canary) if attack.outside]
    assert len(tried) >= 15
    for attack in tried:
        found = subprocess.run(
            [sys.executable, "-c", attack.program], capture_output=True, text=True, timeout=60
        )
        assert "ESCAPED" in found.stdout, (attack.name, found)


def test_f10_the_limit_of_memory_holds_for_all_processes_together():
    program = """
        import os, time
        for _ in range({0}):
            if os.fork() == 0:
                kept = bytearray(6 * 10**7)
                time.sleep(60)
        time.sleep(2)
        print("still here")
        """
    limits = Limits(seconds=20.0, memory_mb=256)
    allowed = run(program.format(3), limits=limits)
    assert allowed.good and allowed.output == "still here\n", allowed
    ended = run(program.format(6), limits=limits)
    assert (ended.status, ended.output) == (128 + signal.SIGKILL, ""), ended


def test_f10_a_program_larger_than_its_disk_is_scored_as_any_other():
    reward = CodeReward(disk_mb=1, seconds=20.0)
    program = "x = '" + "a" * 3_000_000 + "'\nprint(len(x))"
    tests = [{"input": "", "output": "3000000"}, {"input": "b" * 2_000_000, "output": "no"}]
    assert reward([RewardSample("", program, np.zeros(0, np.int64), {"tests": tests})]) == [0.5]


def test_f10_what_is_mounted_in_a_folder_of_the_system_is_read_only_too(tmp_path):
    """In a mount namespace of the test, where a small tmpfs lies in /usr/local."""
    inside = """
        import subprocess, sys
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/usr/local"], check=True)
        open("/usr/local/there", "w").close()
        from hybridflow.kit.sandbox.programs import run_program
        program = "import os\\nprint(os.listdir('/usr/local'))\\nopen('/usr/local/there', 'w')"
        found = run_program(program)
        print(found.output, found.errors)
        """
    command = ["unshare", "--mount", sys.executable, "-c", textwrap.dedent(inside)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare failed" in found.stderr:
        pytest.skip(found.stderr)
    assert "['there']" in found.stdout and "Read-only file system" in found.stdout, found


@pytest.mark.parametrize(
    "user",
    [
        pytest.param(
            ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"], id="root of a container"
        ),
        pytest.param(
            ["--bounding-set=-net_admin", "--inh-caps=-net_admin"], id="root without networks"
        ),
        pytest.param(["--reuid=54321", "--regid=54321", "--clear-groups"], id="a user"),
    ],
)
def test_f10_without_privileges_programs_are_isolated_by_a_user_namespace(
    user, monkeypatch, canary, tmp_path
):
    python = Path("/usr/bin/python3")
    if os.geteuid() or not python.exists():
        pytest.skip("needs root, and a Python that every user may run")
    if subprocess.run(["setpriv", *user, "unshare", "--user", "true"]).returncode:
        pytest.skip("this machine has no user namespaces for those without privileges")
    source = tmp_path / "jail.py"  # which every user may read
    shutil.copyfile(jail.__file__, source)
    monkeypatch.setattr(process, "JAIL", source)
    start = subprocess.Popen
    monkeypatch.setattr(
        process.subprocess,
        "Popen",
        lambda command, **given: start(["setpriv", *user, *command], **given),
    )
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "_base_executable", str(python.resolve()), raising=False)
    monkeypatch.setattr(process, "_idle", [])
    monkeypatch.setattr(process, "_starter", None)
    try:
        forks = """
            import os, time
            made = 0
            try:
                while made < 100:
                    if os.fork() == 0:
                        time.sleep(60)
                    made += 1
            except OSError:
                print(made, os.getuid() == 0)
            """
        found = run_program(textwrap.dedent(forks), None, Limits(seconds=20.0, processes=4))
        assert found.output == "3 False\n", found
        chosen = [
            attack
            for attack in attacks(canary)
            if attack.name.startswith(("read", "network", "process: a signal"))
        ]
        for attack in chosen[::4]:
            end = run_program(attack.program, "", attack.limits)
            assert attack.right(end), (attack.name, end)
        with Sandbox(serve=lambda door: door.close, limits=Limits(seconds=20.0)) as box:
            # Process 1 belongs to the program's user too: signals for it must not let it go on.
            made = box.python(SIGNALS)
            assert (made.reason, made.status, made.output) == ("ended", 0, "sent\n"), made
            before = box.read("beat")
            time.sleep(0.3)
            assert box.read("beat") == before
            box.write("tries.py", TRIES)
            assert box.run(["python3", "tries.py"]).output == "0 111 111 "
        eventually(lambda: not left_behind())
    finally:
        process.close_idle()


def test_f10_a_machine_without_libseccomp_is_told(tmp_path, monkeypatch):
    """An interpreter whose ctypes does not find it, as it is where the package is missing."""
    copy = tmp_path / "jail.py"
    text = Path(jail.__file__).read_text()
    assert "libseccomp.so.2" in text
    copy.write_text(text.replace("libseccomp.so.2", "libno-such-library.so.2"))
    monkeypatch.setattr(process, "JAIL", copy)
    monkeypatch.setattr(process, "_idle", [])
    monkeypatch.setattr(process, "_starter", None)
    [(subject, found, remedy)] = programs.diagnose()
    assert (
        subject == "sandbox" and "libno-such-library.so.2: cannot open shared object file" in found
    )
    assert "apt install libseccomp2" in remedy
    process.close_idle()
    monkeypatch.undo()
    assert programs.diagnose() == [
        ("sandbox", "programs run isolated: namespaces, and a filter of system calls", "")
    ]


def test_f2_a_killed_process_leaves_no_program_and_no_folder(tmp_path):
    mark = secrets.randbelow(10**9) + 10**9
    program = f"""
        import os, subprocess, sys
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep({mark})"])
        if os.fork() == 0:
            os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep({mark})"])
        """
    runner = f"""
        from hybridflow.kit.sandbox.process import Limits
        from hybridflow.kit.sandbox.programs import run_program
        run_program({textwrap.dedent(program)!r}, None, Limits(seconds=600.0))
        """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(runner)], env=environment)
    eventually(lambda: len(sleeping(mark)) == 4)
    started = jail.below(child.pid)
    child.kill()
    child.wait()
    try:
        eventually(lambda: not sleeping(mark))
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def sleeping(mark: int) -> list[str]:
    """Processes of this machine that were told to sleep for `mark` seconds."""
    found = []
    for file in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = Path(file).read_bytes().split(b"\0")
        except OSError:
            continue
        if f"import time; time.sleep({mark})".encode() in words:
            found.append(file)
    return found
