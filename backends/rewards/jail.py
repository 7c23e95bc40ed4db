"""The process in which a program of a model runs: its own namespaces and root, limits, no network.

sandbox.py starts this script as `python -I -S jail.py SIZE`, with SIZE bytes of settings (JSON) on
standard input. It imports the standard library alone. Three processes follow from one another:

    main        unshares namespaces, and waits; it is still a process of this machine
    supervise   is process 1 of the namespaces: when it dies, all processes in them die
    program     has limits and no privileges

The exit status is the program's, or 128 + n if signal n ended it. Status 125 means that the script
could not isolate itself, and ran nothing; the reason is then on standard error.
"""

import ctypes
import json
import os
import resource
import signal
import sys

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


def main():
    """Read the settings, run the program isolated, and exit with its status."""
    settings = json.loads(sys.stdin.buffer.read(int(sys.argv[1])))
    privileged = os.geteuid() == 0
    try:
        isolate(privileged)
    except (OSError, KeyError) as error:
        sys.exit(refuse(error))

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
        sys.exit(refuse(problem.decode()))
    sys.exit(1 if status == 125 else status)  # 125 is ours


def supervise(settings, privileged, writer):
    """Run the program as a child; return its exit status.

    A problem before the program runs is written to the pipe `writer`, by either process.
    """
    try:
        # Die with the parent: sandbox.py kills that one alone.
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

        # The child: it closes the pipe by becoming the program.
        os.chdir("/tmp")
        if settings["input"] is None:
            source = os.open("/dev/null", os.O_RDONLY)
        else:
            source = _input(settings["input"])
        os.dup2(source, 0)
        limit(settings, privileged)
        os.set_inheritable(writer, False)
        os.execve(
            settings["python"],
            [settings["python"], "-I", "-S", "main.py"],
            {"PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        )
    except BaseException as error:
        os.write(writer, str(error).encode(errors="replace"))
        return 125


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
    print(f"cannot isolate: {error}", file=sys.stderr)
    return 125


if __name__ == "__main__":
    main()
