"""A run's folder, which one process at a time may claim, and the signal that asks a run to stop."""

from __future__ import annotations

import json
import platform
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from types import FrameType
from typing import Any

from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.running.lock import hold
from hybridflow.core.values.files import CONFIG, LOCK, MARK


@contextmanager
def claim(
    job: Job,
    resume: bool,
    overwrite: bool,
    mark: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Hold the lock of a job's folder while the body runs, and write its run.json.

    `mark` has the entries of run.json beside the config's tables and the versions.

    `overwrite` without `resume` empties the folder first. Raises ConfigError if another process
    holds it, or if it has a run and neither `resume` nor `overwrite` was asked for.
    """
    folder = job.folder
    with hold(folder):
        if (folder / MARK).exists() and not resume:
            if not overwrite:
                raise ConfigError(
                    f"there is a run in {folder} already; go on with it (--resume), "
                    "replace it (--overwrite), or give this run a name of its own (run.name=...)"
                )
            # The lock is held through its file, which must stay.
            for path in folder.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

        fields = {CONFIG: job.tables, **(mark or {}), "versions": versions(job)}
        (folder / MARK).write_text(json.dumps(fields, indent=2, default=str))
        yield


def versions(job: Job) -> dict[str, str]:
    """Return package -> version of all packages on which the run's results may depend.

    These are Python, torch, numpy, the packages of the job's plugins and their requirements.
    """
    # Plugins by their packages; code of this process has no version.
    by_package = {"python": platform.python_version()}
    modules = {"torch", "numpy"}
    for kind, name in job.plugins():
        package, its_version = registry().owner(kind, name)
        if its_version:
            by_package[package] = its_version
        required = registry().descriptor(kind, name).requires
        modules |= {module.partition(".")[0] for module in required}

    # Modules are named by import (PIL), versions by distribution (pillow).
    distributions = packages_distributions()
    packages: set[str] = set()
    for module in modules:
        packages.update(distributions.get(module, ()))
    for package in sorted(packages):
        by_package[package] = version(package)
    return by_package


class StopSignal:
    """While entered, a SIGTERM sets `requested`; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        # Python sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The run stops after its step. A second signal is no longer caught, and ends it at once.
        self.requested = True
        signal.signal(signal.SIGTERM, self._before)
