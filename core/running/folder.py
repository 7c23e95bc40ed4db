"""A run's folder: claimed by one process at a time, never overwritten unasked; and the signal to stop."""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from types import FrameType
from typing import Any

from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry

MARK = "run.json"


@contextmanager
def claim(job: Job, resume: bool, overwrite: bool) -> Iterator[None]:
    """Hold the folder of a job. Raises ConfigError if another process holds it, or a run is there and neither `resume`
    nor `overwrite` was asked for."""
    folder = job.folder
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another process runs in {folder}; wait for it, or give this run a folder of its own (run.name=...)"
            ) from error
        if (folder / MARK).exists() and not resume:
            if not overwrite:
                raise ConfigError(
                    f"there is a run in {folder} already; go on with it (--resume), replace it (--overwrite), or give this "
                    "run a name of its own (run.name=...)"
                )
            for path in folder.iterdir():
                if path.name != ".lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / MARK).write_text(
            json.dumps({"config": job.tables, "versions": versions(job)}, indent=2, default=str)
        )
        yield


def versions(job: Job) -> dict[str, str]:
    """Python's, ours, and those of the packages that bring the job's plugins and what these require."""
    found = {"python": platform.python_version()}
    modules = {"torch", "numpy"}
    for kind, name in job.plugins():
        package, its_version = registry().owner(kind, name)
        if its_version:
            found[package] = its_version
        modules |= {
            module.partition(".")[0] for module in registry().descriptor(kind, name).requires
        }
    distributions = packages_distributions()
    for package in sorted(
        {package for module in modules for package in distributions.get(module, ())}
    ):
        found[package] = version(package)
    return found


class StopSignal:
    """SIGTERM asks for a checkpoint at the end of the step; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, self._before)
