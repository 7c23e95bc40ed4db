"""The sandbox: programs run, and what they try beyond that fails."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from hybridflow.backends.rewards.code import CodeReward
from hybridflow.backends.rewards.sandbox import Limits, run_program
from hybridflow.core.contracts.reward import RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.plugins.resolve import reward_from

FAST = Limits(seconds=3.0)


def run(program: str, given: str | None = None, limits: Limits = FAST):
    return run_program(textwrap.dedent(program), given, limits)


@pytest.fixture(scope="module", autouse=True)
def isolates():
    try:
        run("pass")
    except RewardError as error:
        pytest.skip(str(error))


def test_a_program_reads_writes_and_imports_the_standard_library():
    found = run(
        "import json, math, sys\nprint(json.dumps([math.pi > 3, input()]))\nprint('no', file=sys.stderr)", "line\n"
    )
    assert found.good and found.output == '[true, "line"]\n' and found.errors == "no\n"
    assert run("raise SystemExit(3)").status == 3
    wrong = run("1 / 0")
    assert wrong.status == 1 and "ZeroDivisionError" in wrong.errors


def test_nothing_of_this_machine_can_be_read_or_written(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    tmp_path.chmod(0o777)
    for path in (
        secret,
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/1/environ",
        "/sys/kernel",
        __file__,
        os.path.abspath("."),
    ):
        assert "FileNotFoundError" in run(f"import os; os.stat({str(path)!r})").errors, path
    assert run(f"open({str(tmp_path / 'new')!r}, 'w')").status == 1 and not (tmp_path / "new").exists()
    for place in ("/usr/x", "/x", "/dev/x", "/lib/x"):
        assert run(f"open({place!r}, 'w')").status == 1, place
    seen = run("import os; print(sorted(os.environ))").output
    assert set(eval(seen)) <= {"PATH", "HOME", "LC_CTYPE"}


def test_files_are_gone_with_the_program_and_do_not_fill_the_disk():
    assert run("open('/tmp/left', 'w').write('x')").good
    assert run("import os; print(os.listdir('/tmp'))").output == "['main.py']\n"
    full = run(
        """
        written = 0
        try:
            for i in range(64):
                with open(f"/tmp/{i}", "wb") as file:
                    written += file.write(bytes(10**6))
        except OSError:
            pass
        print(written)
        """,
        limits=Limits(seconds=3.0, disk_mb=4),
    )
    assert int(full.output) <= 5 * 10**6


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        assert found.status == 1 and "Error" in found.errors
    assert run("import socket; socket.create_connection(('8.8.8.8', 53), 1)").status == 1
    with socket.socket(socket.AF_UNIX) as server:  # an abstract address belongs to the network too
        server.bind("\0hybridflow-sandbox-test")
        server.listen()
        assert run("import socket; socket.socket(socket.AF_UNIX).connect('\\0hybridflow-sandbox-test')").status == 1


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"], ids=["busy", "asleep"])
def test_time_is_limited(program):
    started = time.monotonic()
    found = run(program, limits=Limits(seconds=1.0))
    assert not found.good and found.reason in ("time", "ended") and time.monotonic() - started < 10


def test_memory_is_limited():
    found = run("x = bytearray(10**9)", limits=Limits(seconds=3.0, memory_mb=128))
    assert found.status == 1 and "MemoryError" in found.errors


def test_output_is_limited():
    found = run("while True: print('x' * 1000)", limits=Limits(seconds=3.0, output_bytes=5000))
    assert found.reason == "output" and len(found.output) <= 5000


def test_a_fork_bomb_stops_at_the_limit_of_processes():
    found = run(
        """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                made += 1
        except OSError:
            print(made)
        """
    )
    assert 0 < int(found.output) <= 8


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


def test_what_root_may_do_it_may_not():
    for call in (
        "os.setuid(0)", "os.chroot('/tmp')", "os.mknod('/tmp/sda', 0o660 | 0o060000, os.makedev(8, 0))",
        "os.sched_setaffinity(0, {0}); os.nice(-5)",
        "ctypes.CDLL(None, use_errno=True).mount(b'x', b'/tmp', b'tmpfs', 0, None) and 1 / 0",
        "ctypes.CDLL(None, use_errno=True).unshare(0x20000) and 1 / 0",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    ):  # fmt: skip
        assert run(f"import ctypes, os, resource\n{call}").status != 0, call


def test_a_program_that_holds_on_to_life_ends_with_its_time():
    mark = f"88{os.getpid()}"
    program = f"""
        import ctypes, signal, time
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        for s in (1, 2, 15):
            signal.signal(s, signal.SIG_IGN)
        open("/tmp/{mark}", "w")
        import os, sys
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep({mark})"])
        """
    assert run(program, limits=Limits(seconds=1.0)).reason == "time"
    time.sleep(0.5)
    assert not left_behind(f"time.sleep({mark})")


def test_a_program_cannot_pretend_that_the_sandbox_failed():
    found = run("import sys; sys.stderr.write('cannot isolate: x'); sys.exit(125)")
    assert found.reason == "ended" and found.status == 1


def test_programs_side_by_side_do_not_share_their_limit_of_processes():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: run("import time; time.sleep(1)", limits=Limits(seconds=20, processes=1)), range(4))
        )
    assert all(outcome.good for outcome in found), found


def test_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("pass")
    run("while True: pass", limits=Limits(seconds=0.5))
    assert list(tmp_path.iterdir()) == []


def sample(response: str, tests) -> RewardSample:
    return RewardSample("p", response, np.array([1]), {"tests": tests})


def test_the_reward_is_the_share_of_tests_that_pass():
    double = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(1) == 3"]
    assert CodeReward(seconds=3.0)([sample(double, tests)]) == [pytest.approx(2 / 3)]
    assert CodeReward(seconds=3.0, all_or_nothing=True)([sample(double, tests)]) == [0.0]
    assert reward_from("code", {"seconds": 3.0})(
        [sample("print(int(input()) + 1)", [{"input": "4", "output": "5\n"}])]
    ) == [1.0]
    assert CodeReward(seconds=3.0)([sample("no program at all", ["assert True"])]) == [0.0]
    assert CodeReward(seconds=3.0)([sample("import os; os._exit(0)", ["assert False"])]) == [0.0]
    assert CodeReward(seconds=3.0)([sample("print('done'); raise SystemExit", ["assert False"])]) == [0.0]


def test_bad_tests_and_options_are_told():
    for tests in (None, [], "assert True", [3], [{"input": "4"}]):
        with pytest.raises(RewardError, match="test"):
            CodeReward()([sample("pass", tests)])
    with pytest.raises(ConfigError, match="secs"):
        CodeReward(secs=3)
    with pytest.raises(ConfigError, match="memory_mb"):
        reward_from("code", {"memory_mb": 1})
