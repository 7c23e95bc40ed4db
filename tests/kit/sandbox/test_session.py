"""A sandbox for several commands: what stays between them, what does not, and its door."""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import signal
import socket
import textwrap
import threading
import time
from pathlib import Path

import attrs
import pytest
from helpers.programs import AMPLE, ends, run

from hybridflow.kit.sandbox import jail, process
from hybridflow.kit.sandbox.process import Limits, SandboxError
from hybridflow.kit.sandbox.session import DOOR, DOOR_URL, OWN, TAKEN, Sandbox

CONNECT = """
import socket
for address in (("127.0.0.1", 8000), ("127.0.0.1", 8001), ("127.0.0.2", 8000), ("{0}", {1})):
    try:
        with socket.create_connection(address, 5) as connection:
            connection.sendall(b"in")
            print(connection.recv(9))
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.fixture(autouse=True)
def isolated():
    """Skip where this machine isolates no programs."""
    run("pass")


@pytest.fixture
def box():
    with Sandbox(limits=AMPLE) as made:
        yield made


def test_files_stay_between_commands_and_end_with_the_sandbox(box):
    box.write("notes/a.txt", "one\n")
    assert box.run(["sh", "-c", "cat notes/a.txt; echo two >> notes/a.txt"]).output == "one\n"
    assert box.read("notes/a.txt") == b"one\ntwo\n" == box.read("/tmp/notes/a.txt")
    whole = bytes(range(256)) * 1000
    box.write("whole", whole)
    assert box.read("whole") == whole
    assert box.python("print(len(open('whole', 'rb').read()))").output == "256000\n"
    with Sandbox() as other:
        assert other.run(["ls", "/tmp"]).output == ""
        assert other.run(["id", "-u"]).output != box.run(["id", "-u"]).output


def test_a_sandbox_that_cannot_be_made_runs_nothing_ever(tmp_path):
    """A command after the one that was refused would have the root of this machine."""
    gone = tmp_path / "gone"
    gone.mkdir()
    box = Sandbox({"/agent": gone})
    gone.rmdir()
    with pytest.raises(SandboxError, match="does not let a program run apart from it"):
        box.write("a", "x")
    for _ in range(2):
        with pytest.raises(SandboxError, match="was closed, or killed"):
            box.python("import os\nprint(os.listdir('/'))")
    box.close()


def test_a_door_whose_sandbox_is_refused_is_closed(monkeypatch):
    wrong = attrs.evolve(OWN, processes=10**30)  # which is no limit that the kernel takes
    monkeypatch.setattr("hybridflow.kit.sandbox.session.OWN", wrong)
    monkeypatch.setattr(process, "_idle", [])  # each is a new one, so that none of these is closed

    def sockets() -> int:
        gc.collect()
        opened = Path("/proc/self/fd").iterdir()
        return sum(one.exists() and "socket:" in os.readlink(one) for one in opened)

    before = sockets()
    for _ in range(3):
        with pytest.raises(SandboxError, match="cannot isolate"):
            Sandbox(serve=lambda door: door.close)
    assert sockets() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_command_that_was_interrupted_leaves_nothing_to_the_next(error, monkeypatch):
    with pytest.raises(error), Sandbox() as box:
        box.write("secret", "of the first")
        with monkeypatch.context() as patched:

            def interrupted(*_):
                raise error

            patched.setattr(process, "_read", interrupted)
            box.run(["sleep", "600"], seconds=600.0)
    assert ends(box._jail.pid)
    for _ in range(3):
        found = run("import os\nprint(os.listdir('.'))")
        assert (found.status, found.output) == (0, "['main.py']\n")


def test_text_of_python_finds_nothing_of_the_commands_before_it(box):
    """It looks at all of its memory near its objects; a call of the kernel tells which pages there are."""
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    tests = f"{first}{second}" * 200
    box.python(f"tests = '{tests}'")
    box.run(["true"], tests, variables={"TESTS": tests})
    looks = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
        halves = "{0}".encode(), "{1}".encode()
        os.close(1)
        page, file = 4096, os.open("page", os.O_RDWR | os.O_CREAT)
        def found(around):
            count = 0
            for number in range(-8192, 8192):
                address = (around // page + number) * page
                if address <= 0 or libc.pwrite(file, address, page, 0) != page:
                    continue
                text = os.pread(file, page, 0)
                at = text.find(halves[0])
                while at >= 0:
                    count += text[at + 16 : at + 32] == halves[1]
                    at = text.find(halves[0], at + 1)
            return count
        libc.sbrk.restype = ctypes.c_void_p
        os.write(2, b"%d" % (found(id(halves)) + found(libc.sbrk(0))))
        """
    made = box.python(textwrap.dedent(looks).format(first, second))
    assert made.errors == "0", made
    # It does find what is there.
    there = textwrap.dedent(looks).replace("os.close(1)", "kept = (halves[0] + halves[1]) * 3")
    assert int(box.python(there.format(first, second)).errors) >= 3


def test_processes_end_with_the_command_that_started_them(box):
    beats = "(trap '' TERM HUP; while :; do date +%N > beat; sleep 0.02; done) & "
    assert box.run(["sh", "-c", beats + "until [ -s beat ]; do sleep 0.02; done"]).good
    before = box.read("beat")
    time.sleep(0.3)
    assert box.read("beat") == before
    assert box.run(["sh", "-c", "kill -0 -1"]).status != 0  # nobody else is there


def test_a_command_has_its_arguments_input_and_variables_and_no_shell(box):
    made = box.run(["printf", "%s|", "a b", "$HOME", "*"])
    assert (made.good, made.output) == (True, "a b|$HOME|*|")
    assert box.run(["cat"], b"\xc3\xa9\n").output == "é\n"
    assert box.run(["cat"]).output == ""
    names = box.run(["env"], variables={"MINE": "1"}).output.splitlines()
    assert "MINE=1" in names and "HOME=/tmp" in names
    assert {name.partition("=")[0] for name in names} == {"PATH", "HOME", "MINE"}
    assert box.run(["sh", "-c", "echo $MINE"], variables={"MINE": 3}).output == "3\n"
    with Sandbox(variables={"MINE": "2"}) as other:
        shown = 'echo "$MINE"; pwd; echo $0 >&2; exit 3'
        made = other.run(["sh", "-c", shown, "name"])
        assert (made.status, made.output, made.errors) == (3, "2\n/tmp\n", "name\n")
    assert box.run(["python3", "-c", "import sys; print(sys.version_info[:2])"]).output
    # Its signals are not Python's, which ignores that of a pipe nobody reads.
    assert box.run(["sh", "-c", "yes | head -n 1; echo $?"]).output == "y\n0\n"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["no-such-program"], 127, "no-such-program"),
        (["/tmp"], 126, "Permission denied"),
        (["sh", "-c", "kill -9 $$"], 137, ""),
        (["a\0b"], 126, "null"),
    ],
)
def test_a_command_that_cannot_run_has_the_status_that_shells_give_it(box, command, status, said):
    made = box.run(command)
    assert made.status == status and said in made.errors
    assert box.run(["true"]).good


@pytest.mark.parametrize("command", ["ls -l", [], ""])
def test_a_command_is_a_list(box, command):
    with pytest.raises(SandboxError, match="a command is a list of texts"):
        box.run(command)


def test_folders_are_read_only_at_their_paths(tmp_path):
    shown = tmp_path / "with space"
    (shown / "deep").mkdir(parents=True)
    (shown / "deep" / "tool.py").write_text("print(40 + 2)")
    for path in (tmp_path, *tmp_path.parents):
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    with Sandbox({"/agent": shown, "/opt/more": str(tmp_path)}) as box:
        assert box.run(["python3", "/agent/deep/tool.py"]).output == "42\n"
        assert box.run(["ls", "/opt/more"]).output == "with space\n"
        made = box.run(
            ["sh", "-c", "echo x > /agent/deep/tool.py; rm -rf /agent/deep; touch /agent/new"]
        )
        assert made.errors.count("Read-only file system") >= 3
        with pytest.raises(SandboxError, match=r"cannot write '/agent/x': OSError: .* Read-only"):
            box.write("/agent/x", "")
    assert (shown / "deep" / "tool.py").read_text() == "print(40 + 2)"
    assert sorted(os.listdir(shown)) == ["deep"]


@pytest.mark.parametrize(
    "inside",
    [
        *TAKEN, f"{TAKEN[-1]}/more", os.path.dirname(TAKEN[-1]), "/usr/local/new", "/there/inner", "/", "agent", "",
        "/agent/", "/a/../usr", "//agent", "/a/./b",
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_shown_is_refused(inside, tmp_path):
    (tmp_path / "inner").mkdir()
    with pytest.raises(SandboxError, match="give an absolute path such as '/agent'"):
        Sandbox({"/there": tmp_path, inside: tmp_path})
    assert os.listdir(tmp_path) == ["inner"]


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(SandboxError, match="no-such' at /agent: it is no folder"):
        Sandbox({"/agent": tmp_path / "no-such"})


def test_limits_are_those_of_a_command_and_the_disk_that_of_all():
    with Sandbox(limits=Limits(seconds=20.0, disk_mb=4, memory_mb=100)) as box:
        assert box.run(["true"]).good
        started = time.monotonic()
        made = box.run(["sh", "-c", "echo begun; sleep 60"], seconds=2.0)
        assert (made.reason, made.output) == ("time", "begun\n")
        assert box.python("import time; time.sleep(60)", seconds=0.5).reason == "time"
        assert time.monotonic() - started < 15
        assert box.run(["python3", "-c", "bytearray(2 * 10**8)"]).status == 1
        fill = "head -c 3000000 /dev/zero > $0"
        assert box.run(["sh", "-c", fill, "a"]).good
        assert "No space left" in box.run(["sh", "-c", fill, "b"]).errors
        assert box.run(["rm", "a", "b"]).good and box.run(["sh", "-c", fill, "b"]).good
        with pytest.raises(SandboxError, match=r"cannot write 'c': OSError: .* No space left"):
            box.write("c", bytes(3_000_000))


def test_text_of_python_runs_beside_files_of_the_same_name(box):
    box.write("main.py", "mine")
    made = box.python("def f():\n    1 / 0\nf()")
    assert made.status == 1 and "    1 / 0\n" in made.errors
    assert box.read("main.py") == b"mine"


def test_a_file_that_is_not_there_or_never_ends_is_an_error(box, monkeypatch):
    with pytest.raises(SandboxError, match="cannot read 'none': FileNotFoundError"):
        box.read("none")
    monkeypatch.setattr("hybridflow.kit.sandbox.session.OWN", Limits(seconds=1.0))
    # What a program has put in the place of a file is followed with the program's own rights.
    box.run(["ln", "-s", "/dev/urandom", "link"])
    with pytest.raises(SandboxError, match="cannot read 'link'"):
        box.read("link")
    with pytest.raises(SandboxError, match="Read-only file system"):
        box.write("/usr/new", "x")


def test_what_is_written_takes_the_place_of_what_a_command_has_left(box):
    left = "mkdir -p a.py/b; echo old > c.py; chmod 400 c.py; ln -s /usr/new d.py; ln -s . e.py"
    assert box.run(["sh", "-c", left]).good
    for name in ("a.py", "c.py", "d.py", "e.py"):
        box.write(name, name)
        assert box.read(name) == name.encode()
    assert sorted(box.run(["ls", "-A"]).output.split()) == ["a.py", "c.py", "d.py", "e.py"]
    box.run(["sh", "-c", "rm -r *; touch tests; head -c 70000000 /dev/zero > zeros"])
    with pytest.raises(SandboxError, match=r"cannot write 'tests/a.py': FileExistsError"):
        box.write("tests/a.py", "")


def test_a_large_file_is_read():
    with Sandbox(limits=Limits(seconds=20.0, disk_mb=60)) as box:
        box.run(["sh", "-c", "head -c 50000000 /dev/urandom > large"])
        made = box.run(["sha256sum", "large"]).output.split()[0]
        assert hashlib.sha256(box.read("large")).hexdigest() == made


def test_a_sandbox_that_is_closed_ends_the_command_that_runs_in_it():
    box = Sandbox()
    found = []

    def waits():
        try:
            box.run(["sleep", "600"], seconds=600.0)
        except SandboxError as error:
            found.append(str(error))

    thread = threading.Thread(target=waits)
    thread.start()
    while not box._running:
        time.sleep(0.01)
    box.close()
    thread.join(10)
    assert found == ["the sandbox was closed, or killed, in a command"]
    assert ends(box._jail.pid)
    box.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        box.run(["true"])


def test_a_sandbox_whose_process_was_killed_says_so(box):
    os.kill(box._jail.pid, signal.SIGKILL)
    assert ends(box._jail.pid)
    with pytest.raises(SandboxError, match="was closed, or killed"):
        box.run(["true"])
    assert run("print(1)").output == "1\n"


def test_the_one_door_leads_to_who_serves_it(monkeypatch):
    """And nothing else of this machine is reached, which listens at another port."""
    ended = []

    def serve(door):
        assert not os.get_inheritable(door.fileno())

        def answers():
            while True:
                try:
                    connection, _ = door.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(connection.recv(9) + b"side")

        threading.Thread(target=answers, daemon=True).start()

        def end():
            ended.append(1)
            door.shutdown(socket.SHUT_RDWR)

        return end

    assert DOOR_URL == "http://127.0.0.1:8000" and DOOR == ("127.0.0.1", 8000)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        program = CONNECT.format(*elsewhere.getsockname())
        with Sandbox(serve=serve, limits=AMPLE) as box, Sandbox(limits=AMPLE) as without:
            for _ in range(2):
                words = box.python(program).output.split()
                assert words[0] == "b'inside'" and len(words) == 4, words
                assert set(words[1:]) == {"ConnectionRefusedError"}
            # There is no route but that to itself, by the loopback.
            [keeper] = jail.children(box._jail.pid)
            assert len(Path(f"/proc/{keeper}/net/route").read_text().splitlines()) == 1
            assert " lo:" in Path(f"/proc/{keeper}/net/dev").read_text()
            assert box.run(["python3", "-c", program]).output.split()[0] == "b'inside'"
            assert without.python(program).output.split() == ["OSError"] * 4
            taken = box.python("import socket\nsocket.create_server(('127.0.0.1', 8000))")
            assert "Address already in use" in taken.errors
            kinds = """
                import socket
                for family, kind, protocol in (
                    (socket.AF_INET, socket.SOCK_STREAM, 0),
                    (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 6),
                    (socket.AF_INET, socket.SOCK_STREAM, 262),
                    (socket.AF_INET, socket.SOCK_DGRAM, 0),
                    (socket.AF_INET, socket.SOCK_RAW, 1),
                    (socket.AF_INET6, socket.SOCK_STREAM, 0),
                    (socket.AF_NETLINK, socket.SOCK_RAW, 0),
                    (socket.AF_VSOCK, socket.SOCK_STREAM, 0),
                ):
                    try:
                        socket.socket(family, kind, protocol)
                        print("made", end=" ")
                    except OSError:
                        print("no", end=" ")
                """
            made = box.python(textwrap.dedent(kinds))
            assert made.output.split() == ["made"] * 2 + ["no"] * 6, made
    assert ended == [1]
