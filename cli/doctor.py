"""`hybridflow doctor`: what works here, and what to do about the rest. It imports whatever claims to be ready."""

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
SMALL_SHM_GB = 1.0
NOT_FOR_USE = ("test", "docs")
"""Extras of hybridflow that a run never needs."""


class DoctorCommand(Command):
    """A plugin of kind "command", name "doctor"."""

    def run(self, arguments: argparse.Namespace) -> int:
        return doctor()


def doctor(console: Console | None = None) -> int:
    """Print what is installed and what works on this machine. 0 unless hybridflow itself cannot run here."""
    console = console or make_console()
    problems: list[str] = []
    print_line(console, "machine", "bold")
    _print_pairs(console, machine())
    print_line(console, "torch", "bold")
    _print_pairs(console, torchstate_of(problems))
    print_line(console, "packages", "bold")
    rows = [
        (f"  {name}", have or "not installed", f"wanted: {want}" if want else "", for_)
        for name, have, want, for_ in packages()
    ]
    print_table(console, ("package", "version", "wanted", "for"), rows, header=False)
    print_line(console)
    print_line(console, "plugins", "bold")
    print_table(console, ("kind", "name", "state", "remedy"), plugin_states(), header=False)
    failed = [e for e in registry().entries() if e.state.startswith("failed")]
    print_failed(console, failed)
    print_line(console)
    for title, found in diagnoses():
        print_line(console, title, "bold")
        print_table(
            console,
            ("what", "found", "to do"),
            [(f"  {a}", b, c) for a, b, c in found],
            header=False,
        )
        print_line(console)
    problems += core_problems()
    for problem in problems:
        print_line(console, f"hybridflow cannot run here: {problem}", "bold red")
    lacking = missing_kinds()
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
    print_table(
        console, ("what", "value"), [(f"  {name}", value) for name, value in pairs], header=False
    )
    print_line(console)


def machine() -> Iterator[tuple[str, str]]:
    """Python, platform, cores, memory, shared memory, disk and open files."""
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    quota = _cpu_quota()
    yield "cores", f"{usable} of {there}" + (f", limited to the time of {quota:g}" if quota else "")
    yield "memory", _memory()
    yield "/dev/shm", _shared_memory()
    yield "disk here", f"{shutil.disk_usage('.').free / 1e9:.1f} GB free in {os.getcwd()}"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = "; low for many processes: ulimit -n 65536" if soft < 4096 else ""
    yield "open files", f"at most {soft}{low}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container may use."""
    limit, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _memory() -> str:
    found = re.findall(
        r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE
    )
    sizes = {name: int(kb) * 1024 / 1e9 for name, kb in found}
    if not sizes:
        return "unknown"
    limit = _read("/sys/fs/cgroup/memory.max")
    limited = f", this container at most {int(limit) / 1e9:.1f} GB" if limit.isdigit() else ""
    return f"{sizes['MemTotal']:.1f} GB, {sizes.get('MemAvailable', 0):.1f} GB available{limited}"


def _shared_memory() -> str:
    if not os.path.isdir("/dev/shm"):
        return "there is none"
    usage = shutil.disk_usage("/dev/shm")
    small = (
        "; small for an object store (Docker: --shm-size=8g)"
        if usage.total / 1e9 < SMALL_SHM_GB
        else ""
    )
    return f"{usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB free{small}"


def torchstate_of(problems: list[str]) -> Iterator[tuple[str, str]]:
    """Version, threads, devices and collectives; `problems` gets what stops everything."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        problems.append(f"torch cannot be imported ({reason(error)}): pip install torch")
        yield "torch", reason(error)
        return
    yield "version", f"{torch.__version__}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for at in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(at)
            yield (
                f"cuda:{at}",
                f"{p.name}, {p.total_memory / 1e9:.1f} GB, compute capability {p.major}.{p.minor}",
            )
    else:
        built = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        )
        yield "cuda", f"no device ({built})"
    if not dist.is_available():
        problems.append("this torch has no torch.distributed: install another build")
        return
    names = [
        n
        for n, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
        if there
    ]
    yield "collectives", ", ".join(names) or "none"


def packages() -> Iterator[tuple[str, str, str, str]]:
    """(name, installed version, what hybridflow wants if that is another, for what) of all that it can make use of."""
    try:
        required = importlib.metadata.requires("hybridflow") or []
        yield "hybridflow", importlib.metadata.version("hybridflow"), "", ""
    except importlib.metadata.PackageNotFoundError:
        return
    seen: dict[str, tuple[str, list[str]]] = {}
    for line in required:
        text, _, marker = line.partition(";")
        extra = (re.findall(r"extra\s*==\s*['\"]([^'\"]+)", marker) or [""])[0]
        match = re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*(.*)", text.strip())
        if match is None or match[1] == "hybridflow" or extra in NOT_FOR_USE:
            continue
        seen.setdefault(match[1], (match[2], []))[1].append(extra)
    for name, (wanted, extras) in seen.items():
        have = _version(name)
        wrong = have is not None and not _satisfies(have, wanted)
        yield name, have or "", wanted if wrong else "", ", ".join(e for e in extras if e)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with many packages, not with ours
        return True
    return SpecifierSet(wanted).contains(version, prereleases=True)


def plugin_states() -> list[tuple[str, str, str, str]]:
    """(kind, name, state, remedy) of every plugin, after those that say they are ready were imported."""
    for entry in registry().entries():
        if entry.state == "ready":
            try:
                registry().get(entry.kind, entry.name)
                registry().config_class(entry.kind, entry.name)
            except PluginError:  # the registry remembers it as failed
                continue
    return [(f"  {e.kind}", e.name, *state_of(e)) for e in registry().entries()]


def diagnoses() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Of the plugins that can say more of their packages: (kind and name, rows of what, found, what to type)."""
    for kind, name, path in registry().diagnoses():
        try:
            module, _, function = path.partition(":")
            yield f"{kind} {name}", list(getattr(importlib.import_module(module), function)())
        except Exception as error:
            yield f"{kind} {name}", [("diagnosis", f"failed: {reason(error)}", "tell its author")]


def core_problems() -> list[str]:
    """What stops every run."""
    problems = []
    if sys.version_info < PYTHON:
        problems.append(
            f"python {platform.python_version()}; {'.'.join(map(str, PYTHON))} or newer is needed"
        )
    try:
        import hybridflow.core.launch  # noqa: F401
    except Exception as error:
        problems.append(
            f"hybridflow.core does not import: {reason(error)}; pip install --force-reinstall hybridflow"
        )
    return problems


def missing_kinds() -> list[str]:
    """Kinds that every training run needs and that have no plugin that is ready."""
    ready = {entry.kind for entry in registry().entries() if entry.state == "ready"}
    return [kind for kind in ("runtime", "training_backend", "algorithm") if kind not in ready]
