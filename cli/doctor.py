"""`hybridflow doctor`: says what works on this machine, and how to repair what does not.

It imports every plugin that claims to be ready.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from hybridflow.cli.plugins import print_failed, state_of
from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import PluginError
from hybridflow.core.names import reason
from hybridflow.core.plugins import registry
from hybridflow.kit.console import make_console, print_line, print_table

PYTHON = (3, 11)
"""The oldest version that hybridflow runs on."""
SMALL_SHM_GB = 1.0
"""Shared memory below this is small for an object store, in 10^9 bytes."""
NOT_FOR_USE = ("test", "docs")
"""Extras of hybridflow that a run never needs, such as those of tests."""


class DoctorCommand(Command):
    """A plugin of kind "command", name "doctor"."""

    def run(self, arguments: argparse.Namespace) -> int:
        return doctor()


def doctor(console: Console | None = None) -> int:
    """Print what is installed and works; return the exit status, 0 unless hybridflow cannot run."""
    console = console or make_console()
    problems: list[str] = []
    # The machine and torch, without which nothing runs.
    print_line(console, "machine", "bold")
    _print_pairs(console, machine())
    print_line(console, "torch", "bold")
    _print_pairs(console, torchstate_of(problems))

    # Other packages: those installed, and those of which another version is required.
    print_line(console, "packages", "bold")
    rows = [
        (f"  {name}", have or "not installed", f"wanted: {want}" if want else "", purpose)
        for name, have, want, purpose in packages()
    ]
    print_table(console, ("package", "version", "wanted", "for"), rows, header=False)
    print_line(console)

    # Plugins, then the reasons of failures, then the plugins' diagnoses of their own packages.
    print_line(console, "plugins", "bold")
    print_table(console, ("kind", "name", "state", "remedy"), plugin_states(), header=False)
    failed = [entry for entry in registry().entries() if entry.state.startswith("failed")]
    print_failed(console, failed)
    print_line(console)
    for title, findings in diagnoses():
        cells = [(f"  {what}", finding, remedy) for what, finding, remedy in findings]
        print_line(console, title, "bold")
        print_table(console, ("what", "found", "to do"), cells, header=False)
        print_line(console)

    problems += core_problems()
    return _print_verdict(console, problems)


def _print_verdict(console: Console, problems: list[str]) -> int:
    """Print whether hybridflow can run here; return the exit status."""
    for problem in problems:
        print_line(console, f"hybridflow cannot run here: {problem}", "bold red")
    lacking = missing_kinds()
    # Plugins may still be installed: that alone is no failure.
    for kind in lacking:
        print_line(
            console,
            f"no {kind} is ready, so no model can be trained yet; see the remedies above",
            "yellow",
        )
    if not problems and not lacking:
        print_line(console, "hybridflow can run here", "bold green")
    return 1 if problems else 0


def _print_pairs(console: Console, pairs: Iterator[tuple[str, str]]) -> None:
    """Print a table of names and values, and an empty line."""
    rows = [(f"  {name}", value) for name, value in pairs]
    print_table(console, ("what", "value"), rows, header=False)
    print_line(console)


def machine() -> Iterator[tuple[str, str]]:
    """Yield names and values: Python, platform, cores, memory, shared memory, disk, open files."""
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()

    # Cores that this process may run on, and in a container its quota of CPU time.
    usable = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    limited = f", limited to the time of {quota:g}" if quota else ""
    yield "cores", f"{usable} of {os.cpu_count()}{limited}"

    yield "memory", _memory()
    yield "/dev/shm", _shared_memory()
    yield "disk here", f"{shutil.disk_usage('.').free / 1e9:.1f} GB free in {os.getcwd()}"
    # Each rank holds sockets and files open.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = "; low for many processes: ulimit -n 65536" if soft < 4096 else ""
    yield "open files", f"at most {soft}{low}"


def _read(path: str) -> str:
    """Return the text of a file; nothing where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _cpu_quota() -> float | None:
    """Return the number of cores whose time the container may use; None: it has no limit."""
    limit, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _memory() -> str:
    """Return as text the machine's memory, the available part, and the container's limit."""
    matches = re.findall(
        r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE
    )
    sizes = {name: int(kilobytes) * 1024 / 1e9 for name, kilobytes in matches}
    if not sizes:
        return "unknown"

    # "max", or no file: there is no limit.
    limit = _read("/sys/fs/cgroup/memory.max")
    limited = f", this container at most {int(limit) / 1e9:.1f} GB" if limit.isdigit() else ""
    return f"{sizes['MemTotal']:.1f} GB, {sizes.get('MemAvailable', 0):.1f} GB available{limited}"


def _shared_memory() -> str:
    """Return the size of /dev/shm, and a remedy where it is small."""
    if not os.path.isdir("/dev/shm"):
        return "there is none"

    # Containers often have 64 MB of it.
    usage = shutil.disk_usage("/dev/shm")
    remedy = ""
    if usage.total / 1e9 < SMALL_SHM_GB:
        remedy = "; small for an object store (Docker: --shm-size=8g)"
    return f"{usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB free{remedy}"


def torchstate_of(problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yield names and values: version, threads, devices and collectives of torch.

    Problems that stop every run are appended to `problems`.
    """
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        problems.append(f"torch cannot be imported ({reason(error)}): pip install torch")
        yield "torch", reason(error)
        return
    yield "version", f"{torch.__version__}, {torch.get_num_threads()} threads"
    from hybridflow.kit import onednn

    chosen = "oneDNN" if onednn.is_faster() else "torch"
    yield "float32 products on CPUs", f"by {chosen} (processor: {onednn.maker() or 'unknown'})"

    # List the devices; without one, say whether this build of torch could use any.
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            memory = f"{device.total_memory / 1e9:.1f} GB"
            capability = f"compute capability {device.major}.{device.minor}"
            yield f"cuda:{i}", f"{device.name}, {memory}, {capability}"
    else:
        version = torch.version.cuda
        build = f"built for CUDA {version}" if version else "a build without CUDA"
        yield "cuda", f"no device ({build})"

    if not dist.is_available():
        problems.append("this torch has no torch.distributed: install another build")
        return
    backends = (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
    names = [name for name, available in backends if available]
    yield "collectives", ", ".join(names) or "none"


def packages() -> Iterator[tuple[str, str, str, str]]:
    """Yield the packages that hybridflow can make use of, itself first.

    Each is a tuple of its name, its installed version, the versions that hybridflow requires if
    the installed one is not among them, and the extras that need it.
    """
    try:
        required = importlib.metadata.requires("hybridflow") or []
        yield "hybridflow", importlib.metadata.version("hybridflow"), "", ""
    except importlib.metadata.PackageNotFoundError:
        return

    # Requirements look like `ray[default]>=2.9; extra == "ray"`; one package may be in several.
    wishes: dict[str, tuple[str, list[str]]] = {}
    for line in required:
        text, _, marker = line.partition(";")
        extra = (re.findall(r"extra\s*==\s*['\"]([^'\"]+)", marker) or [""])[0]
        match = re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*(.*)", text.strip())
        if match is None or match[1] == "hybridflow" or extra in NOT_FOR_USE:
            continue
        _, extras = wishes.setdefault(match[1], (match[2], []))
        extras.append(extra)

    # The required versions are named only where the installed one is not among them.
    for name, (wanted, extras) in wishes.items():
        have = _version(name)
        wrong = have is not None and not _satisfies(have, wanted)
        purpose = ", ".join(extra for extra in extras if extra)
        yield name, have or "", wanted if wrong else "", purpose


def _version(package: str) -> str | None:
    """Return the installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, wanted: str) -> bool:
    """Return whether a version satisfies a specifier such as ">=2.9,<3"."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with many packages, not with ours
        return True
    return SpecifierSet(wanted).contains(version, prereleases=True)


def plugin_states() -> list[tuple[str, str, str, str]]:
    """Return kind, name, state and remedy of every plugin.

    Those that claim to be ready are imported first, to see whether they are.
    """
    for entry in registry().entries():
        if entry.state == "ready":
            try:
                registry().get(entry.kind, entry.name)
                registry().config_class(entry.kind, entry.name)
            except PluginError:  # the registry remembers it as failed
                continue
    return [(f"  {e.kind}", e.name, *state_of(e)) for e in registry().entries()]


def diagnoses() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield the plugins' diagnoses of their own packages: a title, and rows.

    A row has the subject, the finding, and the remedy.
    """
    for kind, name, path in registry().diagnoses():
        # One diagnosis that fails must not hide the others.
        try:
            module, _, function = path.partition(":")
            diagnose = getattr(importlib.import_module(module), function)
            yield f"{kind} {name}", list(diagnose())
        except Exception as error:
            yield f"{kind} {name}", [("diagnosis", f"failed: {reason(error)}", "tell its author")]


def core_problems() -> list[str]:
    """Return the problems that stop every run."""
    problems = []
    if sys.version_info < PYTHON:
        oldest = ".".join(map(str, PYTHON))
        problems.append(f"python {platform.python_version()}; {oldest} or newer is needed")
    # This imports all of the core.
    try:
        import hybridflow.settle.launch  # noqa: F401
    except Exception as error:
        problems.append(
            f"hybridflow.core does not import: {reason(error)}; "
            "pip install --force-reinstall hybridflow"
        )
    return problems


def missing_kinds() -> list[str]:
    """Return the kinds of plugins that every training run needs, and of which none is ready."""
    ready = {entry.kind for entry in registry().entries() if entry.state == "ready"}
    return [kind for kind in ("runtime", "training_backend", "algorithm") if kind not in ready]
