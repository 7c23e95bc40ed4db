"""Runs programs of a model, each isolated: its own namespaces and root, limits, no network.

process.py starts this script as `python -I -S jail.py`, with a socket as standard input, and keeps
it: a fork takes a fraction of the time of a new interpreter. It imports the standard library alone,
and a program is read in its own process. Each of these is forked from the one before:

    begin       takes a socket for each process that is to serve
    serve       takes a message for each program: its files
    keep        unshares namespaces and makes a root, which stay for the programs that follow
    supervise   is process 1 of a program's processes: when it dies, all of them do
    program     has limits, no privileges, and no files but the three standard ones

The exit status is the program's, or 128 + n if signal n ended it. Status 125 means that it could
not be isolated, and did not run; the reason is then on its standard error. docs/security.md says
what holds a program back.
"""

import atexit
import builtins
import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import types

# Flags of unshare(2)
NEWNS = 0x20000
NEWCGROUP = 0x2000000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
# Flags of mount(2)
RDONLY = 1
NOSUID = 2
NODEV = 4
REMOUNT = 32
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
KEPT = {"nodev": NODEV, "noexec": 8, "noatime": 1 << 10, "nodiratime": 1 << 11, "relatime": 1 << 21}
"""Options of a mount that a user namespace may not take from it, by their names in mountinfo."""
# Flag of umount2(2)
DETACH = 2
# Options of prctl(2)
NO_NEW_PRIVS = 38
PDEATHSIG = 1
DUMPABLE = 4
SECCOMP = 22
FILTER = 2
CAPABILITY_VERSION = 0x20080522
"""Of the argument of capset(2)."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CLONE = {"x86_64": 56, "aarch64": 220}
"""The numbers of system calls, by machine. libc has no function for pivot_root, and its function
for clone does not return in the child, as fork does."""
SYSTEM = ("usr", "lib", "lib64", "lib32", "bin")
"""Folders of this machine that a Python interpreter links to; the program sees them read-only."""
ROOT = "/sys"
"""Where the program's root is mounted, in its own namespace: a folder that every machine has, and
that holds nothing of what SYSTEM names. So no folder is made, and none is left."""
SOCKET_TYPES = 0xF
"""Of the second argument of socket(2), which has flags too."""
DOOR = ("127.0.0.1", 8000)
"""Where a program finds its door, in its own network."""
FILES = 5
"""Number of files of each message for a program."""
SIOCSIFFLAGS = 0x8914
"""Of ioctl(2): set the flags of a network interface."""
IFF_UP = 1
INODES = 4096
"""Largest number of files of a program: each takes memory of the kernel, also an empty one."""
WATCH_S = 0.05
"""Time between two looks at the memory of a program's processes, in seconds."""
VARIABLES = {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "HOME": "/tmp"}
"""A program's environment variables."""
SYSTEM_CALLS = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile
    copy_file_range splice tee open openat openat2 creat close close_range dup dup2 dup3 pipe pipe2
    fcntl flock ioctl stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
    readlink readlinkat getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat
    rename renameat renameat2 link linkat symlink symlinkat chmod fchmod fchmodat fchmodat2 chown
    fchown lchown fchownat umask truncate ftruncate fallocate fadvise64 fsync fdatasync utime utimes
    futimesat utimensat getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr
    lsetxattr fsetxattr

    mmap munmap mprotect mremap madvise msync mincore brk membarrier

    fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill getpid getppid gettid
    getpgid setpgid getpgrp getsid setsid getuid geteuid getgid getegid getresuid getresgid
    getgroups capget getrlimit setrlimit prlimit64 getrusage times getpriority setpriority getcpu
    sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval prctl arch_prctl set_tid_address set_robust_list
    get_robust_list futex futex_waitv rseq restart_syscall pidfd_open pidfd_send_signal sysinfo
    uname getrandom

    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend
    rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack signalfd signalfd4 pause alarm getitimer setitimer
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create
    timerfd_settime timerfd_gettime nanosleep clock_nanosleep clock_gettime clock_getres
    gettimeofday time

    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
    epoll_pwait2 eventfd eventfd2 bind connect listen accept accept4 getsockname getpeername
    getsockopt setsockopt sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown
"""
"""The system calls of a program, and with conditions clone, socket and socketpair. The kernel says
of all others that there are none: among them those for namespaces, mounts, keys, tracing, io_uring,
bpf, userfaultfd, and shared memory beyond the limits (memfd_create, System V)."""
# Of libseccomp
ALLOW = 0x7FFF0000
ERRNO = 0x50000
NOT_EQUAL = 1
EQUAL = 4
GREATER = 6
MASKED_EQUAL = 7
OPTIMIZE = 8
libc = ctypes.CDLL(None, use_errno=True)
libc_with_lock = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter's lock in a call: the child of a fork by it has that lock too."""


def call(name, *arguments):
    """Call a function of libc; raises OSError where it fails."""
    encoded = [os.fsencode(value) if isinstance(value, str) else value for value in arguments]
    if getattr(libc, name)(*encoded) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def bind(source, target):
    """Show the folder `source` at `target`, with all that is mounted in it; seal() follows."""
    call("mount", source, target, None, ctypes.c_ulong(BIND | REC), None)


def seal(targets, mounts):
    """Make the folders `targets` read-only, and what is mounted in them.

    mounts: /proc/self/mountinfo, open. The kernel ignores these flags when it binds, and a remount
    reaches one mount alone.
    """
    for line in mounts:
        _, _, _, _, point, options, *_ = line.split()
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)  # spaces as \\040
        if any(point == target or point.startswith(f"{target}/") for target in targets):
            kept = sum(KEPT.get(option, 0) for option in options.split(","))
            flags = REMOUNT | BIND | RDONLY | NOSUID | kept
            call("mount", None, point, None, ctypes.c_ulong(flags), None)


def make_root(settings):
    """Make a small tmpfs the root, with Python and the folders to show, and drop the old root."""
    root = ROOT
    prefix = settings["prefix"]
    mounts = open("/proc/self/mountinfo", errors="surrogateescape")  # noqa: SIM115

    # Mounts from here on are not seen outside.
    call("mount", None, "/", None, ctypes.c_ulong(REC | PRIVATE), None)
    size = f"size={settings['disk_bytes']},nr_inodes={INODES},mode=755"
    call("mount", "tmpfs", root, "tmpfs", ctypes.c_ulong(NOSUID | NODEV), size)
    for inside in settings["folders"]:
        os.makedirs(root + inside)  # first: later it could be in a folder of this machine

    # Python and what it links to
    shown = []
    for name in SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.mkdir(root + path)
            bind(path, root + path)
            shown.append(root + path)
    if not os.path.isdir(root + prefix):  # a Python that is not under /usr
        os.makedirs(root + prefix)
        bind(prefix, root + prefix)
        shown.append(root + prefix)
    for inside, outside in settings["folders"].items():
        bind(outside, root + inside)
        shown.append(root + inside)
    seal(shown, mounts)

    # Devices
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "urandom"):
        with open(f"{root}/dev/{name}", "w"):
            pass
        call("mount", f"/dev/{name}", f"{root}/dev/{name}", None, ctypes.c_ulong(BIND), None)

    # A folder that programs may write to
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)

    # Change roots. A root that was only left (chroot) could be entered again.
    os.mkdir(f"{root}/old")
    call("syscall", ctypes.c_long(PIVOT_ROOT[os.uname().machine]), root, f"{root}/old")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    os.rmdir("/old")


def limit(settings, privileged, permitted):
    """Set the limits of this process and of those that it starts, and drop its privileges.

    permitted: what make_filters() returns.
    """
    # In a user namespace our two processes, keep and supervise, belong to the same user.
    processes = settings["processes"] + (0 if privileged else 2)
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["disk_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))

    # Root's processes are not counted, so root becomes a user that is not used otherwise. Any other
    # user has no privileges in its namespace already.
    if privileged:
        become(settings["uid"])
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)

    # Nor has it any in its own user namespace.
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    call("capset", header, none)
    chosen = permitted[settings["door"]]
    call("prctl", SECCOMP, FILTER, ctypes.byref(chosen), 0, 0)


def become(user):
    """Become another user, who has no groups but one of the same number."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


class Compared(ctypes.Structure):
    """A condition on an argument of a system call: libseccomp's struct scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
    )


class Filter(ctypes.Structure):
    """Instructions of a filter, of 8 bytes each: the kernel's struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def make_filters():
    """Return the filters of a program's system calls: for one without a door, and for one with it.

    Raises OSError where libseccomp, which compiles them, is missing or refuses.
    """
    return make_filter(False), make_filter(True)


def make_filter(door):
    """Return a filter; with a door it allows connections by TCP. Raises OSError."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ERRNO | errno.ENOSYS)))
    library.seccomp_attr_set(rules, OPTIMIZE, 2)  # a search tree; libseccomp 2.5 and later

    # Names that this kernel's architecture, or this version of the library, does not have have
    # negative numbers.
    for name in SYSTEM_CALLS.split():
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            made = library.seccomp_rule_add_array(rules, ctypes.c_uint32(ALLOW), number, 0, None)
            checked(made, name)

    # No namespaces, and no sockets but those of this machine's processes and, to a door, of TCP:
    # each other family is code of the kernel that the program has no use for.
    spaces = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWCGROUP
    local, internet = int(socket.AF_UNIX), int(socket.AF_INET)
    other_family = ERRNO | errno.EAFNOSUPPORT
    rules_by_argument = [
        ("clone", ALLOW, [Compared(0, MASKED_EQUAL, spaces, 0)]),
        ("socket", ALLOW, [Compared(0, EQUAL, local, 0)]),
        ("socketpair", ALLOW, [Compared(0, EQUAL, local, 0)]),
        ("socketpair", other_family, [Compared(0, NOT_EQUAL, local, 0)]),
        ("socket", other_family, [Compared(0, GREATER, internet, 0)]),
    ]
    if door:
        stream = Compared(1, MASKED_EQUAL, SOCKET_TYPES, int(socket.SOCK_STREAM))
        for protocol in (0, int(socket.IPPROTO_TCP)):
            tcp = [Compared(0, EQUAL, internet, 0), stream, Compared(2, EQUAL, protocol, 0)]
            rules_by_argument.append(("socket", ALLOW, tcp))
    else:
        rules_by_argument.append(("socket", other_family, [Compared(0, EQUAL, internet, 0)]))
    for name, action, conditions in rules_by_argument:
        number = library.seccomp_syscall_resolve_name(name.encode())
        given = (Compared * len(conditions))(*conditions)
        made = library.seccomp_rule_add_array(
            rules, ctypes.c_uint32(action), number, len(conditions), given
        )
        checked(made, name)

    with open(os.memfd_create("filter"), "rb") as file:
        checked(library.seccomp_export_bpf(rules, file.fileno()), "seccomp_export_bpf")
        file.seek(0)
        instructions = file.read()
    return Filter(len(instructions) // 8, instructions)


def checked(returned, name):
    """Raise OSError where a function of libseccomp returned an error."""
    if returned < 0:
        raise OSError(-returned, f"{name}: {os.strerror(-returned)}")


def isolate(settings):
    """Enter new namespaces; return whether this process may still become another user.

    Without privileges a user namespace comes first, which maps this user alone. Raises OSError
    where the kernel refuses.
    """
    flags = NEWNS | NEWUTS | NEWIPC | NEWNET
    parent = os.getppid()
    try:
        call("unshare", flags)
        if settings["door"]:
            raise_loopback()
        return True
    except PermissionError:
        # Root in a container. In a user namespace it would still be root, whose processes are not
        # counted. The kernel forgets this process's parent and hides its files with the change.
        if os.geteuid() == 0:
            become(settings["uid"])
            die_with(parent)
            call("prctl", DUMPABLE, 1, 0, 0, 0)
    user = os.getuid()
    group = os.getgid()
    call("unshare", flags | NEWUSER)

    # The kernel requires setgroups to be denied before an unprivileged user maps groups.
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    if settings["door"]:
        raise_loopback()
    return False


def die_with(parent):
    """Have the kernel end this process with its parent, which may have ended meanwhile."""
    call("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(125)


def raise_loopback():
    """Let the processes of this network namespace reach each other. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def begin():
    """Start a process that serves for each socket that comes, until process.py closes its own.

    The answers are their numbers, or -1 where there can be no more processes.
    """
    channel = socket.socket(fileno=0)
    try:
        permitted = make_filters()
    except OSError as error:
        permitted = error
    gc.freeze()  # a collection in a child would copy the pages that they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    own = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(channel, 16, 1)
        if not message:
            return
        try:
            started = os.fork()
        except OSError:
            started = -1
        if started == 0:
            die_with(own)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(files[0], 0)
            os.close(files[0])
            os._exit(serve(permitted))
        os.close(files[0])
        channel.send(b"%d" % started)


def serve(permitted):
    """Run one program after another, until process.py closes the socket, which is file 0; return 0.

    permitted: what make_filters() returns, or its error.

    Each message for a program has FILES: the settings of the place in which it runs, its own (both
    JSON), and its standard input, output and error. Its text is how much memory its processes may
    hold together, in bytes. The answer is the exit status, one byte, and with the first one comes
    the door, if there is one: a socket that listens in the program's network. A message "kill" ends
    the program that runs; "end" ends its place: namespaces, files, door.
    """
    channel = socket.socket(fileno=0)
    number = os.getpid()
    own = resident(number)
    kept = None
    while True:
        message, files, _, _ = socket.recv_fds(channel, 32, FILES)
        if not message:
            return 0
        if message == b"end" and kept:
            keeper, programs = kept
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
            programs.close()
            kept = None
        if len(files) != FILES:  # it may be "kill", for a program that has ended meanwhile
            continue

        if kept is None:
            programs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            keeper = os.fork()
            if keeper == 0:
                die_with(number)
                for descriptor in (*files, channel.fileno(), programs.fileno()):
                    os.close(descriptor)
                os._exit(keep(theirs, permitted))
            theirs.close()
            kept = keeper, programs
        keeper, programs = kept
        socket.send_fds(programs, [b"run"], files)
        for descriptor in files:
            os.close(descriptor)
        if not watch(keeper, programs, channel, own, int(message)):
            return 0


def watch(keeper, programs, channel, own, most):
    """Wait until a program has ended, and pass the answer on; return False where nobody waits.

    It is killed where the processes below `keeper` hold more than `most` bytes together, without
    the `own` bytes that each of them has in common with this process.
    """
    killed = False
    while True:
        ready, _, _ = select.select([programs.fileno(), channel.fileno()], [], [], WATCH_S)
        if programs.fileno() in ready:
            status, files, _, _ = socket.recv_fds(programs, 1, 1)
            if status:
                socket.send_fds(channel, [status], files)
            for descriptor in files:
                os.close(descriptor)
            return bool(status)
        if ready:
            if channel.recv(16) != b"kill":
                return False
            killed = True
        elif sum(max(resident(process) - own, 0) for process in below(keeper)) > most:
            killed = True
        if killed:  # as often as it takes: it may not have begun
            for child in children(keeper):
                kill(child, keeper)


def kill(child, parent):
    """Kill a child of a process, if it has not ended and been waited for."""
    with contextlib.suppress(ProcessLookupError):
        held = os.pidfd_open(int(child))
        # Its number could be another process's by now.
        if child in children(parent):
            signal.pidfd_send_signal(held, signal.SIGKILL)
        os.close(held)


def children(process):
    """Return the numbers of the processes that a process has started, as texts."""
    found = []
    with contextlib.suppress(OSError):  # it may have ended
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                found += file.read().split()
    return found


def below(process):
    """Return the numbers of the processes that a process has started, and those have started."""
    return [one for child in children(process) for one in (child, *below(child))]


def resident(process):
    """Return the memory that a process holds and that is no file's, in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status") as file:
        lines = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
        return sum(int(kilobytes) for _, kilobytes, _ in lines) * 1024
    return 0


def keep(programs, permitted):
    """Make a place, and run programs in it, one after the other; return the exit status.

    Where the place cannot be made, this process ends, as nothing may run elsewhere.
    """
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # where the socket was
    place = None
    while True:
        message, files, _, _ = socket.recv_fds(programs, 16, FILES)
        if not message:
            return 0
        doors = []
        try:
            if place is None:
                if isinstance(permitted, OSError):
                    raise permitted
                made = read(files[0])
                privileged = isolate(made)
                make_root(made)
                if made["door"]:
                    doors.append(socket.create_server(DOOR, backlog=64).detach())
                place = made
            status = supervised(place, privileged, permitted, files[1], files[2:])
        except BaseException as error:
            status = refuse(error, files[-1])
        socket.send_fds(programs, [bytes([status])], doors)
        for descriptor in (*files, *doors):
            os.close(descriptor)
        if place is None:
            return 125


def read(file):
    """Return what a file has as JSON."""
    with open(os.dup(file), "rb") as opened:
        opened.seek(0)
        return json.load(opened)


def supervised(place, privileged, permitted, program, streams):
    """Run a program whose processes end with it; return its exit status. Raises OSError."""
    reader, writer = os.pipe()
    supervisor = fork_as_first()
    if supervisor == 0:
        try:
            os.close(reader)
            os._exit(supervise(place, privileged, permitted, program, streams, writer))
        finally:
            os._exit(125)  # whatever was raised: a copy of this process must not go on as it

    # The pipe brings the problem that kept the program from running, or nothing.
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        problem = pipe.read(4096)
    # When process 1 has ended, all have.
    status = exit_status(os.waitpid(supervisor, 0)[1])
    if problem:
        raise OSError(problem.decode())
    return 1 if status == 125 else status  # 125 is ours


def fork_as_first():
    """Fork, as os.fork, into a new namespace of processes, in which the child is process 1.

    A process can unshare that namespace once only. Raises OSError.
    """
    number = ctypes.c_long(CLONE[os.uname().machine])
    flags = ctypes.c_ulong(NEWPID | int(signal.SIGCHLD))
    forked = libc_with_lock.syscall(number, flags, *[ctypes.c_ulong(0)] * 4)
    if forked < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"clone: {os.strerror(error)}")
    return forked


def supervise(place, privileged, permitted, program, streams, writer):
    """Run the program as a child; return its exit status.

    program: the file of its settings. A problem before it runs is written to the pipe `writer`, by
    either process.
    """
    try:
        # A signal for which it has a handler reaches even process 1.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Die with the parent.
        call("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # Where the parent was killed before that, nobody reads the pipe: poll reports an error.
        poll = select.poll()
        poll.register(writer, 0)
        if poll.poll(0):
            return 125

        # Process 1 waits for all children, those whose parents have died included.
        child = os.fork()
        if child:
            os.close(writer)
            while True:
                ended, status = os.wait()
                if ended == child:
                    return exit_status(status)

        # The child. Closing the pipe says that the program begins.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        settings = {**place, **read(program)}
        os.chdir("/tmp")
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        limit(settings, privileged, permitted)
        os.closerange(3, 1024)
    except BaseException as error:
        os.write(writer, str(error).encode(errors="replace"))
        return 125
    if settings["command"]:
        return execute(settings["command"], settings["variables"])
    return run(settings["program"], settings["file"])


def execute(command, variables):
    """Become another program; return the exit status where there is none."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**VARIABLES, **variables})
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]}: {error}\n".encode(errors="replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126


def save(program, path):
    """Write the program's text to a file. Raises OSError, and leaves none."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(program)
    except OSError:
        os.unlink(path)
        raise


def run(program, path):
    """Run the program's text as `python FILE` would; return its exit status.

    path: of the file that it is in, or "".
    """
    if path:
        with contextlib.suppress(OSError):  # where there is no room, errors do not show its lines
            save(program, path)
    # What a new interpreter would have.
    os.environ.clear()
    os.environ.update(VARIABLES)
    sys.argv = [os.path.basename(path)]
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace")  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    main = types.ModuleType("__main__")
    main.__file__ = path
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.setrecursionlimit(sys.getrecursionlimit() + 20)  # the frames below it

    try:
        exec(compile(program, main.__file__, "exec"), vars(main))
        status = 0
    except BaseException as error:
        status = _raised(error)
    return max(status, _finish())


def _raised(error):
    """Return the exit status for what the program raised, which goes to its standard error."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 255
        print(error.code, file=sys.stderr)
        return 1
    # Without the frame of `run`.
    shown = error.with_traceback(error.__traceback__.tb_next)
    sys.excepthook(type(shown), shown, shown.__traceback__)
    return 1


def _finish():
    """End threads and write what is buffered, as an interpreter does; return 120 if that fails."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException as error:
        os.write(2, f"Exception ignored at exit: {error!r}\n".encode(errors="replace"))
        return 120
    return 0


def exit_status(status):
    """Return the exit status for a status of os.wait; 128 + n for signal n."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def refuse(error, errors):
    """Write to the file `errors` why nothing was run; return the exit status for that."""
    os.write(errors, f"cannot isolate: {error}\n".encode(errors="replace"))
    return 125


if __name__ == "__main__":
    begin()
