"""What a program in the sandbox tries beyond its own work fails."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.programs import ends, run

from hybridflow.kit.sandbox import jail, process
from hybridflow.kit.sandbox.process import Limits


def test_a_system_call_that_fails_is_an_error_with_its_name():
    jail.call("getppid")
    with pytest.raises(OSError, match="rmdir: No such file or directory") as caught:
        jail.call("rmdir", "/no/such/folder")
    assert isinstance(caught.value, FileNotFoundError)


def test_a_program_that_a_signal_ends_has_the_status_that_shells_give_it():
    for ended, status in (("exit 3", 3), ("kill -9 $$", 128 + signal.SIGKILL)):
        shell = os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", ended])
        assert jail.exit_status(os.waitpid(shell, 0)[1]) == status


def test_a_supervisor_whose_parent_was_killed_before_it_could_be_told_runs_nothing():
    """It has asked for the signal after that, which then never comes; the program would run on without any limit."""

    class Place:
        def keys(self):
            os._exit(7)  # it has begun

    program = os.memfd_create("program")
    os.write(program, b"{}")
    for gone, status in ((False, 7), (True, 125)):
        reader, writer = os.pipe()
        if gone:
            os.close(reader)
        child = os.fork()
        if child == 0:
            os._exit(jail.supervise(Place(), False, None, program, (0, 1, 2), writer))
        assert jail.exit_status(os.waitpid(child, 0)[1]) == status
        os.close(writer)
    os.close(program)


def test_without_a_root_of_its_own_nothing_runs_and_the_status_says_so(tmp_path):
    settings = {
        "prefix": sys.prefix,
        "folders": {},
        "door": False,
        "disk_bytes": -(10**9),
        "uid": 54321,
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        started, below = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = subprocess.Popen([sys.executable, "-I", "-S", jail.__file__], stdin=below, env={})
        below.close()
        socket.send_fds(started, [b"serve"], [theirs.fileno()])
    serving = int(started.recv(16))
    files = [tmp_path / name for name in ("place", "program", "input", "output", "errors")]
    files[0].write_text(json.dumps(settings))
    opened = [os.open(file, os.O_RDWR | os.O_CREAT) for file in files]
    socket.send_fds(ours, [b"1000000000"], opened)
    assert ours.recv(16) == bytes([125])
    ours.close()
    assert ends(serving)
    started.close()
    assert server.wait(10) == 0
    for descriptor in opened:
        os.close(descriptor)
    assert files[4].read_text().startswith("cannot isolate: ")
    assert files[3].read_text() == ""


def test_files_are_gone_with_the_program():
    assert run("open('/tmp/left', 'w').write('x')").good
    assert run("import os; print(os.listdir('/tmp'))").output == "['main.py']\n"


def left_behind(mark: str) -> list[str]:
    """Processes of this machine whose command line has the mark."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if mark in line]


def test_processes_end_with_the_program_that_started_them():
    mark = f"77{os.getpid()}"
    program = f"""
        import os, subprocess, sys
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep({mark})"])
            os._exit(0)
        os.wait()
        """
    assert run(program).good
    time.sleep(0.2)
    assert not left_behind(f"time.sleep({mark})")
    run(program + "\n        import time; time.sleep(60)", limits=Limits(seconds=1.0))
    time.sleep(0.5)
    assert not left_behind(f"time.sleep({mark})")


def test_no_process_of_this_machine_can_be_seen_or_ended():
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = run(f"import os; os.kill({child.pid}, 9)")
        assert found.status == 1 and "ProcessLookupError" in found.errors and child.poll() is None
        assert run("import os; print(os.getpid(), os.getppid())").output == "2 1\n"
    finally:
        child.kill()
        child.wait()


def test_programs_side_by_side_do_not_share_their_limit_of_processes():
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda _: run("import time; time.sleep(1)", limits=Limits(seconds=20, processes=1)),
                range(4),
            )
        )
    assert all(outcome.good for outcome in found), found


def test_a_program_has_no_capabilities_and_no_files_but_three():
    found = run(
        """
        import ctypes, os
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(1, 1, 1)
        print(ctypes.CDLL(None).capget(header, sets), *sets)
        for number in range(1024):
            try:
                os.fstat(number)
            except OSError:
                continue
            print(number)
        """
    )
    assert found.output.split() == ["0"] * 7 + ["0", "1", "2"], found


def test_a_program_finds_nothing_of_the_one_before_in_its_memory():
    mark = secrets.token_hex(8)
    assert run(f"kept = '{mark}'\nprint(kept)").output.strip() == mark
    found = run(
        f"""
        import gc
        mark = "".join(reversed("{mark[::-1]}"))
        texts = [one for one in gc.get_objects() if isinstance(one, (dict, list, str, bytes))]
        print(sum(mark in str(one) for one in texts if one is not globals()))
        """
    )
    # Its own globals aside, which hold the mark reversed and not.
    assert found.good, found
    assert int(found.output) == 0


def test_programs_of_one_jail_do_not_see_what_others_changed():
    first = run("import json, os, sys\njson.loads = None\nos.environ['X'] = '1'\nsys.path.clear()")
    second = run(
        "import json, os, sys\nprint(json.loads('[1]'), os.environ.get('X'), len(sys.path) > 1)"
    )
    assert first.good and second.output == "[1] None True\n", second


def test_an_ended_process_is_not_killed_again_and_a_strangers_is_never():
    child = subprocess.Popen(["sleep", "600"])
    jail.kill(str(child.pid), 1)  # whose child it is not
    assert child.poll() is None
    jail.kill(str(child.pid), os.getpid())
    assert child.wait(10) == -signal.SIGKILL
    jail.kill(str(child.pid), os.getpid())


def test_a_jail_that_was_ended_is_not_used_again():
    assert run("pass").good
    [*_, jailed] = process._idle
    os.kill(jailed.pid, signal.SIGKILL)
    assert ends(jailed.pid)
    assert run("pass").good and jailed not in process._idle


def test_jails_end_with_the_process_that_uses_them():
    program = """
        from hybridflow.kit.sandbox import process, programs
        programs.run_program("pass")
        print(process._idle[0].pid, flush=True)
        import os
        os.kill(os.getpid(), 9)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    pid = int(done.stdout)
    assert ends(pid)


@pytest.mark.parametrize(
    ("program", "status", "output", "errors"),
    [
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("raise SystemExit", 0, "", ""),
        ("import sys; sys.exit(300)", 44, "", ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0, "late\n", ""),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__, __file__)", 0,
         "__main__ /tmp/main.py\n", ""),
        ("import os, sys; print(sys.argv, sorted(os.environ), os.getcwd())", 0, "['main.py'] ['HOME', 'PATH'] /tmp\n", ""),
        ("def f(n): return n and f(n - 1)\nprint(f(960))", 0, "0\n", ""),
        ("import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True).stdout)", 0,
         "b'7\\n'\n", ""),
        ("print('\\u00e9')", 0, "\u00e9\n", ""),
        ("import sys; sys.stdout.close()", 0, "", None),
        ("import sys; sys.stderr.write('a part of a line')", 0, "", "a part of a line"),
        ("x = (", 1, "", '  File "/tmp/main.py", line 1\n    x = (\n        ^\nSyntaxError: \'(\' was never closed\n'),
        ("def f():\n    1 / 0\nf()", 1, "",
         'Traceback (most recent call last):\n  File "/tmp/main.py", line 3, in <module>\n    f()\n'
         '  File "/tmp/main.py", line 2, in f\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n'),
    ],
)  # fmt: skip
def test_a_program_runs_as_a_new_interpreter_would_run_it(
    program, status, output, errors, tmp_path
):
    found = run(program)
    assert (found.status, found.output) == (status, output), found
    assert errors is None or found.errors == errors
