"""Runs programs of a model, each isolated: its own namespaces and root, limits, no network.

sandbox.py starts this script as `python -I -S jail.py`, with a socket as standard input, and keeps
it: a fork takes a fraction of the time of a new interpreter. It imports the standard library alone,
and never reads a program itself. Each of these is forked from the one before:

    serve       takes a message for each program: its settings, standard output and standard error
    isolated    unshares namespaces, and waits; it is still a process of this machine
    supervise   is process 1 of the namespaces: when it dies, all processes in them die
    program     has limits, no privileges, and no files but the three standard ones

The exit status is the program's, or 128 + n if signal n ended it. Status 125 means that it could
not be isolated, and did not run; the reason is then on its standard error.
"""

import atexit
import builtins
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import types

# Flags of unshare(2)
NEWNS = 0x20000
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
# Flag of umount2(2)
DETACH = 2
# Options of prctl(2)
NO_NEW_PRIVS = 38
PDEATHSIG = 1
CAPABILITY_VERSION = 0x20080522
"""Of the argument of capset(2)."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
"""The number of the system call pivot_root, which libc has no function for."""
SYSTEM = ("usr", "lib", "lib64", "lib32", "bin")
"""Folders of this machine that a Python interpreter links to; the program sees them read-only."""
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Call a function of libc; raises OSError where it fails."""
    encoded = [value.encode() if isinstance(value, str) else value for value in arguments]
    if getattr(libc, name)(*encoded) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def bind(source, target):
    """Show the folder `source` at `target`, read-only."""
    # The kernel ignores the other flags of a bind, so a remount sets them.
    call("mount", source, target, None, ctypes.c_ulong(BIND | REC), None)
    call("mount", None, target, None, ctypes.c_ulong(REMOUNT | BIND | RDONLY | NOSUID), None)


def make_root(settings):
    """Make a small tmpfs the root, with Python and the program in it, and drop the old root."""
    root = settings["root"]
    prefix = settings["prefix"]

    # Mounts from here on are not seen outside.
    call("mount", None, "/", None, ctypes.c_ulong(REC | PRIVATE), None)
    size = f"size={settings['disk_bytes']},mode=755"
    call("mount", "tmpfs", root, "tmpfs", ctypes.c_ulong(NOSUID), size)

    # Python and what it links to
    for name in SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.mkdir(root + path)
            bind(path, root + path)
    if not os.path.isdir(root + prefix):  # a Python that is not under /usr
        os.makedirs(root + prefix)
        bind(prefix, root + prefix)

    # Devices
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "urandom"):
        with open(f"{root}/dev/{name}", "w"):
            pass
        call("mount", f"/dev/{name}", f"{root}/dev/{name}", None, ctypes.c_ulong(BIND), None)

    # The program, in a folder that it may write to
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    with open(f"{root}/tmp/main.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(settings["program"])
    os.chmod(f"{root}/tmp/main.py", 0o644)

    # Change roots. A root that was only left (chroot) could be entered again.
    os.mkdir(f"{root}/old")
    call("syscall", ctypes.c_long(PIVOT_ROOT[os.uname().machine]), root, f"{root}/old")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    os.rmdir("/old")


def limit(settings, privileged):
    """Set the limits of this process and of those that it starts, and drop its privileges."""
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["disk_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))

    # Root's processes are not counted, so root becomes a user that is not used otherwise. Any other
    # user has no privileges in its namespace already.
    if privileged:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)

    # Nor has it any in its own user namespace.
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    call("capset", header, none)


def isolate(privileged):
    """Enter new namespaces; raises OSError where the kernel refuses.

    Without privileges a user namespace comes first, which maps this user alone.
    """
    user = os.getuid()
    group = os.getgid()
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    call("unshare", flags if privileged else flags | NEWUSER)

    # The kernel requires setgroups to be denied before an unprivileged user maps groups.
    if not privileged:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def serve():
    """Run one program after another, until sandbox.py closes the socket.

    Each message has three files: settings (JSON), standard output, standard error. The answer is
    the exit status, one byte. A message "kill" ends the program that runs.
    """
    channel = socket.socket(fileno=0)
    gc.freeze()  # a collection in a child would copy the pages that they share
    while True:
        message, files, _, _ = socket.recv_fds(channel, 16, 3)
        if not message:
            return
        if len(files) != 3:  # "kill", for a program that has ended meanwhile
            continue
        # The pipe is closed when the child and its supervisor have ended.
        alive, held = os.pipe()
        child = os.fork()
        if child == 0:
            channel.close()
            os.close(alive)
            os._exit(begin(*files))
        for descriptor in (*files, held):
            os.close(descriptor)

        ready, _, _ = select.select([alive, channel.fileno()], [], [])
        told = channel.recv(16) if alive not in ready else b"ended"
        if told != b"ended":
            os.kill(child, signal.SIGKILL)
        status = exit_status(os.waitpid(child, 0)[1])
        os.close(alive)
        if not told:
            return
        channel.send(bytes([status]))


def begin(settings, output, errors):
    """Become the program's process on this machine; return its exit status."""
    try:
        call("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        os.open("/dev/null", os.O_RDONLY)  # becomes 0, where the socket was
        os.dup2(output, 1)
        os.dup2(errors, 2)
        with open(settings, "rb") as file:
            file.seek(0)
            given = json.load(file)
        return isolated(given)
    except BaseException as error:
        return refuse(error)


def isolated(settings):
    """Run the program in namespaces of its own; return its exit status."""
    privileged = os.geteuid() == 0
    try:
        isolate(privileged)
    except (OSError, KeyError) as error:
        return refuse(error)

    # The child is the first process of the new namespace: when it dies, all of them do.
    reader, writer = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os._exit(supervise(settings, privileged, writer))

    # The pipe brings the problem that kept the program from running, or nothing.
    os.close(writer)
    problem = os.read(reader, 4096)
    status = exit_status(os.waitpid(supervisor, 0)[1])
    if problem:
        return refuse(problem.decode())
    return 1 if status == 125 else status  # 125 is ours


def supervise(settings, privileged, writer):
    """Run the program as a child; return its exit status.

    A problem before the program runs is written to the pipe `writer`, by either process.
    """
    try:
        # Die with the parent: `serve` kills that one alone.
        call("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        make_root(settings)

        # Process 1 waits for all children, those whose parents have died included.
        program = os.fork()
        if program:
            os.close(writer)
            while True:
                ended, status = os.wait()
                if ended == program:
                    return exit_status(status)

        # The child. Closing the pipe says that the program begins.
        os.chdir("/tmp")
        if settings["input"] is None:
            source = os.open("/dev/null", os.O_RDONLY)
        else:
            source = _input(settings["input"])
        os.dup2(source, 0)
        limit(settings, privileged)
        os.closerange(3, 1024)
    except BaseException as error:
        os.write(writer, str(error).encode(errors="replace"))
        return 125
    return run(settings["program"])


def run(program):
    """Run the program's text as `python main.py` would; return its exit status."""
    # What a new interpreter would have.
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", HOME="/tmp")
    sys.argv = ["main.py"]
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace")  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    main = types.ModuleType("__main__")
    main.__file__ = "/tmp/main.py"
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
            if not stream.closed:
                stream.flush()
    except BaseException as error:
        os.write(2, f"Exception ignored at exit: {error!r}\n".encode(errors="replace"))
        return 120
    return 0


def exit_status(status):
    """Return the exit status for a status of os.wait; 128 + n for signal n."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _input(text):
    """Return an open file with the text, which has no name: the program's standard input."""
    with open("/tmp/.input", "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    descriptor = os.open("/tmp/.input", os.O_RDONLY)
    os.unlink("/tmp/.input")
    return descriptor


def refuse(error):
    """Write to standard error why nothing was run; return the exit status for that."""
    os.write(2, f"cannot isolate: {error}\n".encode(errors="replace"))
    return 125


if __name__ == "__main__":
    serve()
