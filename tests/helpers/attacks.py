"""Programs that attack the sandbox: each writes HELD where it was held back, and ESCAPED where it was not.

They try canaries that a test has made, system calls whose failure is the point, and themselves. Nothing here looks for
anything else of the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import textwrap
from collections.abc import Callable, Iterator

import attrs

from hybridflow.kit.sandbox.process import Limits, ProgramOutcome

HEAD = """
import ctypes, errno, json, mmap, os, signal, socket, subprocess, sys, threading, time
canary = json.loads({canary!r})
libc = ctypes.CDLL(None, use_errno=True)

def attempt(action):
    try:
        found = action()
    except (OSError, MemoryError, ValueError) as error:
        return print("HELD", repr(error))
    print("ESCAPED" if found is not False else "HELD", repr(found)[:200])

def read(path):
    # Whether the canary's secret is there.
    with open(path, "rb") as file:
        return canary["secret"].encode() in file.read(10**6)

def called(number, *arguments):
    # The kernel has no such call for a program: any other answer means that it looked at the arguments.
    ctypes.set_errno(0)
    returned = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return not (returned == -1 and ctypes.get_errno() == errno.ENOSYS)
"""


@attrs.frozen
class Attack:
    """A program, and how it may end."""

    name: str
    program: str
    right: Callable[[ProgramOutcome], bool]
    limits: Limits = attrs.field(factory=lambda: Limits(seconds=20.0))
    outside: bool = False
    """Whether it gets at a canary where it runs without a sandbox."""


def held(outcome: ProgramOutcome) -> bool:
    return "HELD" in outcome.output and "ESCAPED" not in outcome.output and outcome.good


def ended(outcome: ProgramOutcome) -> bool:
    """By a limit, a signal, or itself, and without having got anything."""
    return "ESCAPED" not in outcome.output


def with_status(*statuses: int) -> Callable[[ProgramOutcome], bool]:
    return lambda outcome: (
        outcome.reason == "ended" and outcome.status in statuses and ended(outcome)
    )


def by(reason: str) -> Callable[[ProgramOutcome], bool]:
    return lambda outcome: outcome.reason == reason and ended(outcome)


def attacks(canary: dict[str, object]) -> list[Attack]:
    """canary: `secret`, and where it is: `file`, `folder`, `variable`, `process`, `port`, `abstract`, `socket`."""
    head = HEAD.format(canary=json.dumps(canary))
    found = [
        attrs.evolve(attack, program=head + textwrap.dedent(attack.program))
        for made in (_reads, _writes, _networks, _calls, _processes, _memory, _ends)
        for attack in made()
    ]
    return [*found, *_texts()]


def _reads() -> Iterator[Attack]:
    """Files, variables and folders of this machine."""
    for name, path in {
        "absolute": 'canary["file"]',
        "from the folder above": '"../../../../../.." + canary["file"]',
        "process 1's root": '"/proc/1/root" + canary["file"]',
        "the root of itself": '"/proc/self/root" + canary["file"]',
        "the process's root": 'f"/proc/{canary[\'process\']}/root" + canary["file"]',
        "the old root": '"/old" + canary["file"]',
        "the mount's place": '"/sys" + canary["file"]',
        "shared memory": '"/dev/shm/" + canary["secret"]',
        "a variable of the process": "f\"/proc/{canary['process']}/environ\"",
        "its own variables": '"/proc/self/environ"',
        "variables of process 1": '"/proc/1/environ"',
        "a descriptor of process 1": '"/proc/1/fd/3"',
        "the kernel's memory": '"/proc/kcore"',
        "the machine's memory": '"/dev/mem"',
        "the kernel's log": '"/dev/kmsg"',
        "passwords": '"/etc/shadow"',
        "a terminal": '"/dev/tty"',
        "a fuse": '"/dev/fuse"',
        "a virtual machine": '"/dev/kvm"',
    }.items():
        outside = name in (
            "absolute",
            "from the folder above",
            "shared memory",
            "a variable of the process",
        )
        yield Attack(f"read: {name}", f"attempt(lambda: read({path}))", held, outside=outside)

    through = {
        "a symbolic link": 'os.symlink(canary["file"], "/tmp/link") or read("/tmp/link")',
        "a hard link": 'os.link(canary["file"], "/tmp/hard") or read("/tmp/hard")',
        "a copy": '__import__("shutil").copy(canary["file"], "/tmp/copy") and read("/tmp/copy")',
        "a descriptor of the root": 'os.open(canary["file"][1:], os.O_RDONLY, dir_fd=os.open("/", os.O_RDONLY))',
        "the folder's list": 'os.listdir(canary["folder"])',
        "its size": 'os.stat(canary["file"])',
        "another program": 'subprocess.run(["/bin/cat", canary["file"]], check=True, capture_output=True, timeout=5) '
        'if os.path.exists(canary["file"]) else False',
        "a second root": 'os.mkdir("/tmp/r") or os.chroot("/tmp/r")',
        "variables": 'canary["secret"] in str(dict(os.environ))',
        "variables of libc": '(libc.getenv(canary["variable"].encode()) or False)',
        "open descriptors": "any(readable(number) for number in range(3, 1024))",
        "a change of directory": 'os.chdir(canary["folder"])',
        "a handle": "called(libseccomp['open_by_handle_at'], -100, 0, 0)",
        "a file of this project": f"os.stat({os.path.abspath(__file__)!r})",
        "home": 'os.listdir("/home")',
        "settings of the system": 'os.listdir("/etc")',
        "running programs": 'os.listdir("/run")',
        "what it was started with": 'os.listdir("/proc")',
    }  # fmt: skip
    for name, action in through.items():
        readable = """
            def readable(number):
                try:
                    os.fstat(number)
                    return True
                except OSError:
                    return False
            """
        program = (
            f"{textwrap.dedent(readable)}\nlibseccomp = {NUMBERS!r}\nattempt(lambda: {action})"
        )
        outside = name in ("the folder's list", "its size", "variables", "a file of this project")
        yield Attack(f"read through {name}", program, held, outside=outside)

    memory = """
        # What was in this process before the program began.
        import gc
        mark = canary["secret"][::-1]
        def texts():
            return [one for one in gc.get_objects() if isinstance(one, dict) and one is not globals() and one is not canary]
        attempt(lambda: any(mark[::-1] in str(one.get("kept", "")) for one in texts()))
        """
    yield Attack("read: memory of other programs", memory, held)


def _writes() -> Iterator[Attack]:
    for name, action in {
        "the canary": 'open(canary["file"], "w")',
        "beside the canary": 'open(canary["folder"] + "/new", "w")',
        "the system's folders": 'open("/usr/new", "w")',
        "libraries": 'open("/lib/new", "w")',
        "programs": 'open("/bin/new", "w")',
        "the interpreter": 'open(os.path.realpath(sys.executable), "r+b")',
        "the standard library": 'open(json.__file__, "a")',
        "its compiled files": 'open(json.__cached__, "wb")',
        "devices": 'open("/dev/new", "w")',
        "the root": 'open("/new", "w")',
        "a device of a disk": 'os.mknod("/tmp/disk", 0o060660, os.makedev(8, 0))',
        "a mode of a library": "os.chmod(json.__file__, 0o777)",
        "an owner": "os.chown('/tmp/main.py', 0, 0)",
        "a library's removal": "os.unlink(json.__file__)",
        "a library's name": "os.rename(os.path.dirname(json.__file__), '/tmp/json')",
        "times of a library": "os.utime(json.__file__)",
        "the temporary folder of the machine": 'open("/var/tmp/new", "w")',
        "shared memory": '__import__("multiprocessing.shared_memory").shared_memory.SharedMemory(create=True, size=4096)',
    }.items():  # fmt: skip
        yield Attack(f"write: {name}", f"attempt(lambda: {action})", held)
    privileged = """
        open("/tmp/as_root", "w").close()
        os.chmod("/tmp/as_root", 0o6755)
        attempt(lambda: os.stat("/tmp/as_root").st_uid == 0 and os.geteuid() != 0)
        """
    yield Attack("write: a program that runs as root", privileged, held)


FAMILIES = "INET INET6 AX25 IPX APPLETALK NETLINK PACKET RDS PPPOX LLC CAN TIPC BLUETOOTH ALG VSOCK KCM QIPCRTR"
OTHER_FAMILIES = {
    "SMC": 43,
    "XDP": 44,
    "MCTP": 45,
    "IB": 27,
    "NFC": 39,
    "KEY": 15,
    "IUCV": 32,
    "RXRPC": 33,
}


def _networks() -> Iterator[Attack]:
    for name in FAMILIES.split():
        program = f"""
            family = getattr(socket, "AF_{name}", None)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                attempt(lambda: family is not None and socket.socket(family, kind, 0))
            """
        yield Attack(f"network: a socket of {name}", program, held)
    for name, number in OTHER_FAMILIES.items():
        kinds = "(socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)"
        program = f"for kind in {kinds}: attempt(lambda: socket.socket({number}, kind, 0))"
        yield Attack(f"network: a socket of {name}", program, held)

    for name, action, outside in (
        ("loopback", 'socket.create_connection(("127.0.0.1", canary["port"]), 1)', True),
        ("loopback by name", 'socket.create_connection(("localhost", canary["port"]), 1)', False),
        (
            "an abstract address",
            'socket.socket(socket.AF_UNIX).connect("\\0" + canary["abstract"])',
            True,
        ),
        ("a socket's path", 'socket.socket(socket.AF_UNIX).connect(canary["socket"])', True),
        ("pairs of another family", "socket.socketpair(socket.AF_INET)", False),
        ("an answer of the resolver", 'socket.getaddrinfo("localhost.test", 80)', False),
        ("the names of interfaces", "len(socket.if_nameindex()) > 1", False),
    ):
        yield Attack(f"network: {name}", f"attempt(lambda: {action})", held, outside=outside)


DENIED = """
    unshare setns clone3 mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
    ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise io_uring_setup io_uring_enter
    io_uring_register userfaultfd bpf perf_event_open keyctl add_key request_key memfd_create memfd_secret shmget shmat
    shmctl semget semop semctl msgget msgsnd msgctl mq_open open_by_handle_at name_to_handle_at init_module finit_module
    delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl syslog iopl ioperm modify_ldt personality
    settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname setuid setgid setreuid setresuid setgroups
    setfsuid capset mknod mknodat fanotify_init inotify_init1 landlock_create_ruleset seccomp vmsplice mbind move_pages
    migrate_pages set_mempolicy remap_file_pages lookup_dcookie vhangup mlock mlockall mlock2 sched_setscheduler
    sched_setattr ioprio_set io_setup
"""  # fmt: skip
NAMESPACES = {
    "mounts": 0x20000, "names": 0x4000000, "messages": 0x8000000, "users": 0x10000000, "processes": 0x20000000,
    "networks": 0x40000000, "cgroups": 0x2000000,
}  # fmt: skip


def _numbers() -> dict[str, int]:
    """By libseccomp: the sandbox has no filter without it either."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return {}
    numbers = {
        name: library.seccomp_syscall_resolve_name(name.encode())
        for name in (*DENIED.split(), "clone")
    }
    return {name: number for name, number in numbers.items() if number >= 0}


NUMBERS = _numbers()


def _calls() -> Iterator[Attack]:
    for name, number in NUMBERS.items():
        if name != "clone":
            # Arguments that no kernel accepts, so that a call which is let through does nothing.
            yield Attack(
                f"call: {name}", f"attempt(lambda: called({number}, -1, -1, -1, -1, -1, -1))", held
            )
    for name, flag in NAMESPACES.items():
        # CLONE_SIGHAND without CLONE_VM, which the kernel itself answers with EINVAL.
        program = (
            f"attempt(lambda: called({NUMBERS.get('clone', -1)}, {flag | 0x800 | 17}, 0, 0, 0, 0))"
        )
        yield Attack(f"call: clone with a namespace of {name}", program, held)
    if os.uname().machine == "x86_64":
        yield Attack(
            "call: by the numbers of x32", "attempt(lambda: called(0x40000000 + 39))", ended
        )
        program = """
            # mov eax, 20 (getpid); int 0x80; ret
            code = mmap.mmap(-1, 4096, prot=7)
            code.write(bytes.fromhex("b814000000cd80c3"))
            run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
            attempt(lambda: run() > 0)
            """
        yield Attack("call: by the numbers of i386", program, ended)


def _processes() -> Iterator[Attack]:
    for name, action, outside in (
        ("a signal to the canary", "os.kill(canary['process'], 0)", True),
        ("a signal to process 1's parent", "os.kill(os.getppid() - 1, 9) if os.getppid() > 1 else False", False),
        ("a descriptor of the canary", "os.pidfd_open(canary['process'])", True),
        ("limits of the canary", "__import__('resource').prlimit(canary['process'], 0)", True),
        ("the canary's priority", "os.getpriority(os.PRIO_PROCESS, canary['process'])", True),
        ("a higher priority", "os.nice(-5)", False),
        ("another user", "os.setuid(0)", False),
        ("another group", "os.setgroups([0])", False),
        ("higher limits", "__import__('resource').setrlimit(7, (4096, 4096))", False),
        ("a namespace", "os.unshare(0x10000000) if hasattr(os, 'unshare') else called(272, 0x10000000)", False),
        ("capabilities", "libc.prctl(47, 2, 12, 0, 0) == 0", False),
        ("leaving no_new_privs", "libc.prctl(38, 0, 0, 0, 0) == 0", False),
    ):  # fmt: skip
        yield Attack(f"process: {name}", f"attempt(lambda: {action})", held, outside=outside)

    few = Limits(seconds=20.0, processes=6)
    bomb = """
        made = 0
        try:
            while made < 100:
                if os.fork() == 0:
                    time.sleep(30)
                made += 1
        except OSError:
            pass
        print("HELD" if made < 7 else "ESCAPED", made)
        """
    yield Attack("process: a bomb of forks", bomb, held, few)
    threads = """
        made = 0
        try:
            while made < 100:
                threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
                made += 1
        except RuntimeError:
            pass
        print("HELD" if made < 7 else "ESCAPED", made, flush=True)
        os._exit(0)
        """
    yield Attack("process: a bomb of threads", threads, held, few)
    daemon = """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (1, 2, 13, 15):
                    signal.signal(number, signal.SIG_IGN)
                for number in (0, 1, 2):
                    os.close(number)
                time.sleep(600)
            os._exit(0)
        os.wait()
        print("HELD")
        """
    yield Attack("process: a daemon", daemon, held)
    for name, program in {
        "sleeps behind closed streams": "for number in (0, 1, 2): os.close(number)\ntime.sleep(600)",
        "ignores signals": "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\ntime.sleep(600)",
        "forgets its parent": "libc.prctl(1, 0, 0, 0, 0)\nwhile True: pass",
        "stops": "os.kill(os.getpid(), signal.SIGSTOP)",
        "is another program": 'os.execv(sys.executable, [sys.executable, "-c", "while True: pass"])',
        "ends its first process": "attempt(lambda: os.kill(1, 9))\ntime.sleep(600)",
        "stops its first process": "attempt(lambda: os.kill(1, signal.SIGSTOP))\ntime.sleep(600)",
        "counts without end": "while True: pass",
        "matches without end": 'import re\nre.match("(a*)*b", "a" * 40)',
        "takes a power": "len(str(7 ** (10 ** 8)))",
        "waits for itself": "threading.Thread(target=lambda: threading.main_thread().join()).start()\ntime.sleep(600)",
        "waits for input": "os.pipe()[0]\nos.read(os.pipe()[0], 1)",
    }.items():
        yield Attack(f"process: {name}", program, _time_is_over, Limits(seconds=1.0))
    everyone = 'os.kill(-1, 9) if os.fork() == 0 else (os.wait(), print("HELD"))'
    yield Attack("process: a signal to everyone", everyone, ended)


def _time_is_over(outcome: ProgramOutcome) -> bool:
    """At the limit of wall time, or by the signal for that of CPU time."""
    return outcome.errors == "" and (
        outcome.reason == "time" or outcome.status in (128 + 9, 128 + 24)
    )


def _memory() -> Iterator[Attack]:
    small = Limits(seconds=20.0, memory_mb=128, disk_mb=4)
    for name, action in {
        "an array": "len(bytearray(10**9))",
        "a text": "len('x' * 10**9)",
        "a mapping": "mmap.mmap(-1, 10**9)",
        "a shared mapping": "mmap.mmap(-1, 10**9, flags=mmap.MAP_SHARED)",
        "locked pages": "libc.mlockall(1) == 0",
        "joined pieces": "len(b''.join([bytes(10**7)] * 100))",
        "a file in memory": "os.memfd_create('x') and 1",
        "shared memory of System V": "libc.shmget(0, 10**8, 0o1600) != -1",
        "a queue of System V": "libc.msgget(0, 0o1600) != -1",
        "a semaphore of System V": "libc.semget(0, 1000, 0o1600) != -1",
        "a large file": "os.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 10**9)",
        "a file beyond its disk": "os.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 5 * 10**6)",
        "a reserved file": "os.posix_fallocate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 0, 10**9)",
    }.items():  # fmt: skip
        # A file beyond the limit brings a signal, whose default ends the program.
        program = f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nattempt(lambda: {action})"
        yield Attack(f"memory: {name}", program, held, small)

    together = """
        for _ in range(6):
            if os.fork() == 0:
                kept = {kept}
                time.sleep(30)
        time.sleep(5)
        print("ESCAPED")
        """
    killed = with_status(128 + 9)
    anonymous = together.format(kept="bytearray(6 * 10**7)")
    yield Attack("memory: of many processes", anonymous, killed, small)
    shared = together.format(
        kept="mmap.mmap(-1, 6 * 10**7); [kept.write(bytes(10**6)) for _ in range(60)]"
    )
    yield Attack("memory: shared, of many processes", shared, killed, small)
    orphans = "if os.fork() == 0:\n    os.setsid()\n" + textwrap.indent(
        textwrap.dedent(anonymous), "    "
    )
    yield Attack("memory: of processes that left", orphans + "\ntime.sleep(10)", killed, small)

    files = """
        written = 0
        try:
            for number in range(1000):
                with open(f"/tmp/{number}", "wb") as file:
                    written += file.write(bytes(10**6))
        except OSError:
            pass
        print("HELD" if written <= 5 * 10**6 else "ESCAPED", written)
        """
    yield Attack("disk: full", files, held, small)
    empty = """
        made = 0
        try:
            for made in range(10**5):
                os.mkdir(f"/tmp/{made}")
        except OSError:
            pass
        print("HELD" if made <= 4096 else "ESCAPED", made)
        """
    yield Attack("disk: files without content", empty, held, small)
    devices = """
        written = 0
        try:
            with open("/dev/null", "wb") as file:
                written = file.write(bytes(10**6))
            os.truncate("/dev/zero", 10**6)
            print("ESCAPED")
        except OSError:
            print("HELD", written)
        """
    yield Attack("disk: a device", devices, held, small)
    open_files = """
        kept = []
        try:
            while len(kept) < 10**4:
                kept += os.pipe()
        except OSError:
            pass
        print("HELD" if len(kept) < 64 else "ESCAPED", len(kept))
        """
    yield Attack("files: many open", open_files, held, small)


def _ends() -> Iterator[Attack]:
    """Ends that must not look like anything else."""
    for name, program, right in (
        ("a false refusal", 'sys.stderr.write("cannot isolate: x")\nsys.exit(125)', with_status(1)),
        ("a false refusal at once", 'os.write(2, b"cannot isolate: x")\nos._exit(125)', with_status(1)),
        ("a status beyond a byte", "sys.exit(10**30)", ended),
        ("a text as status", "sys.exit('no')", with_status(1)),
        ("an object as status", "class A:\n    def __str__(self): raise KeyError\nsys.exit(A())", ended),
        ("an error without text", "class A(Exception):\n    def __str__(self): raise KeyError\nraise A", with_status(1)),
        ("an interruption", "raise KeyboardInterrupt", with_status(1)),
        ("an error of every kind", "raise BaseException", with_status(1)),
        ("no memory", "raise MemoryError", with_status(1)),
        ("a fault", "ctypes.string_at(0)", with_status(128 + 11)),
        ("an abort", "os.abort()", with_status(128 + 6)),
        ("its own end", "os.kill(os.getpid(), 9)", with_status(128 + 9)),
        ("recursion", "def f(): f()\nf()", with_status(1)),
        ("no limit of recursion", "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ended),
        ("no standard output", "sys.stdout = None", with_status(0)),
        ("closed streams", "os.close(1); os.close(2)", ended),
        ("no modules", "sys.modules.clear()", ended),
        ("no builtins", "import builtins\nvars(builtins).clear()", ended),
        ("a hook that fails", "sys.excepthook = None\n1 / 0", ended),
        ("an exit handler that fails", "import atexit\natexit.register(lambda: 1 / 0)", ended),
        ("an exit handler without end", "import atexit\natexit.register(lambda: os._exit(0))", with_status(0)),
        ("a flood", "while True: print('x' * 1000)", by("output")),
        ("a flood of errors", "while True: print('x' * 1000, file=sys.stderr)", by("output")),
        ("a flood of a child", "subprocess.run([sys.executable, '-c', \"while True: print('x' * 1000)\"])", by("output")),
        ("bytes that are no text", "os.write(1, bytes(range(256)))", with_status(0)),
        ("half a character", "os.write(1, b'\\xf0\\x9f')", with_status(0)),
        ("a lone surrogate", "print('\\ud800')", with_status(1)),
        ("control characters", "print('\\x1b]0;x\\x07\\x1b[2J')", with_status(0)),
        ("a trace", "sys.settrace(lambda *_: 1 / 0)\ndef f(): pass\nf()", ended),
        ("a thread that fails", "threading.Thread(target=lambda: 1 / 0).start()", with_status(0)),
        ("a message to the sandbox", "for n in range(3, 64): attempt(lambda: os.write(n, b'\\0'))", held),
    ):  # fmt: skip
        yield Attack(f"end: {name}", program, right)


def _texts() -> Iterator[Attack]:
    """Programs that are hardly a text; they run without the head."""
    for name, program, right in (
        ("none", "", with_status(0)),
        ("a NUL", "print(1)\0", with_status(1)),
        ("lone surrogates", "x = '\ud800'\n", with_status(0, 1)),
        ("a mark of byte order", "\ufeffprint(1)", with_status(0, 1)),
        ("more than its disk", "x = '" + "a" * 10**7 + "'\nprint(len(x))", with_status(0)),
        ("more than its memory", "x = '" + "a" * 5 * 10**7 + "'\n" * 2, with_status(1)),
        ("deep brackets", "(" * 10**5, ended),
        ("deep lists", "x = " + "[" * 150 + "]" * 150, with_status(0, 1)),
        ("long sums", "x = " + "+".join(["1"] * 10**5), with_status(0, 1, 128 + 11)),
        ("many lines", "x = 1\n" * 10**5, with_status(0)),
        ("digits", "x = " + "9" * 10**5, with_status(1)),
        ("an encoding", "# coding: rot13\nprint(1)", with_status(0, 1)),
        ("another encoding", "# coding: no-such\nprint(1)", with_status(0, 1)),
        ("other ends of lines", "x = 1\ry = 2\r\nprint(x)", with_status(0)),
        ("no text at all", "\x7fELF\x02\x01\x01", with_status(1)),
        ("a future", "from __future__ import annotations\nprint(1)", with_status(0)),
    ):
        yield Attack(f"text: {name}", program, right)
