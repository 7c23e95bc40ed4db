"""The process in which a program of a model runs: own namespaces, a root of its own, limits, no network.

A script, started by sandbox.py as `python -I -S jail.py SETTINGS`. It imports the standard library alone. Status 125: it could
not isolate itself, and nothing was run.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH, NO_NEW_PRIVS, PDEATHSIG = 2, 38, 1
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYSTEM = ("usr", "lib", "lib64", "lib32", "bin")
"""What a Python interpreter links to, read-only."""
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """A function of libc; raises OSError."""
    given = [a.encode() if isinstance(a, str) else a for a in arguments]
    if getattr(libc, name)(*given) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def bind(source, target):
    """`source` at `target`, read-only."""
    call("mount", source, target, None, ctypes.c_ulong(BIND | REC), None)
    call("mount", None, target, None, ctypes.c_ulong(REMOUNT | BIND | RDONLY | NOSUID), None)


def make_root(settings):
    """A small tmpfs with Python in it, and nothing else of this machine; then the old root is gone."""
    root, prefix = settings["root"], settings["prefix"]
    call("mount", None, "/", None, ctypes.c_ulong(REC | PRIVATE), None)
    size = f"size={settings['disk_bytes']},mode=755"
    call("mount", "tmpfs", root, "tmpfs", ctypes.c_ulong(NOSUID), size)
    for name in SYSTEM:
        there = f"/{name}"
        if os.path.islink(there):
            os.symlink(os.readlink(there), root + there)
        elif os.path.isdir(there):
            os.mkdir(root + there)
            bind(there, root + there)
    if not os.path.isdir(root + prefix):  # a Python that is not under /usr
        os.makedirs(root + prefix)
        bind(prefix, root + prefix)
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "urandom"):
        with open(f"{root}/dev/{name}", "w"):
            pass
        call("mount", f"/dev/{name}", f"{root}/dev/{name}", None, ctypes.c_ulong(BIND), None)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    with open(f"{root}/tmp/main.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(settings["program"])
    os.chmod(f"{root}/tmp/main.py", 0o644)
    os.mkdir(f"{root}/old")
    call("syscall", ctypes.c_long(PIVOT_ROOT[os.uname().machine]), root, f"{root}/old")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    os.rmdir("/old")


def limit(settings, privileged):
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
    if (
        privileged
    ):  # else the user is nobody in its namespace already; of root no process is counted
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)


def isolate(privileged):
    user, group = os.getuid(), os.getgid()
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    call("unshare", flags if privileged else flags | NEWUSER)
    if not privileged:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def main():
    settings = json.loads(sys.stdin.buffer.read(int(sys.argv[1])))
    privileged = os.geteuid() == 0
    try:
        isolate(privileged)
    except (OSError, KeyError) as error:
        sys.exit(refuse(error))
    reader, writer = os.pipe()
    inner = os.fork()
    if inner == 0:  # the first process of the namespace, and ours: when it dies, all of them do
        os._exit(supervise(settings, privileged, writer))
    os.close(writer)
    problem = os.read(reader, 4096)
    status = exit_status(os.waitpid(inner, 0)[1])
    if problem:
        sys.exit(refuse(problem.decode()))
    sys.exit(1 if status == 125 else status)  # 125 is ours


def supervise(settings, privileged, writer):
    """Run the program as a child; its exit status."""
    try:
        call("prctl", PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        make_root(settings)
        program = os.fork()
        if program:
            os.close(writer)
            while True:
                ended, status = os.wait()
                if ended == program:
                    return exit_status(status)
        os.chdir("/tmp")
        os.dup2(
            os.open("/dev/null", os.O_RDONLY)
            if settings["input"] is None
            else _input(settings["input"]),
            0,
        )
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
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _input(text):
    """What the program reads from its standard input."""
    with open("/tmp/.input", "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    opened = os.open("/tmp/.input", os.O_RDONLY)
    os.unlink("/tmp/.input")
    return opened


def refuse(error):
    print(f"cannot isolate: {error}", file=sys.stderr)
    return 125


if __name__ == "__main__":
    main()
