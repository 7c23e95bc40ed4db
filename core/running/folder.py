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
from pathlib import Path
from types import FrameType
from typing import Any

from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.plugins import registry
from hybridflow.core.processes.look import end_stopped
from hybridflow.core.running import supervised
from hybridflow.core.running.lock import hold
from hybridflow.core.values.files import CONFIG, MARK, PROCESSES, WRITTEN
from hybridflow.core.values.sealed import write_sealed


@contextmanager
def claim(job: Job, resume: bool, overwrite: bool) -> Iterator[None]:
    """Hold the lock of a job's folder while the body runs.

    `overwrite` without `resume` removes what an earlier run wrote there. Raises ConfigError if
    another process holds it, or if it has a run and neither `resume` nor `overwrite` was asked for.
    """
    folder = job.folder
    with hold(folder):
        if (folder / MARK).exists() and not resume:
            if not overwrite:
                raise ConfigError(
                    f"there is a run in {folder} already; go on with it (--resume), "
                    "replace it (--overwrite), or give this run a name of its own (run.name=...)"
                )
            _remove_run(folder)

        yield


def write_mark(job: Job, mark: Mapping[str, Any]) -> None:
    """Write run.json, which makes a folder a run's.

    `mark` has its entries beside the config's tables and the versions.
    """
    fields = {CONFIG: job.tables, **mark, "versions": versions(job)}
    write_sealed(job.folder / MARK, json.loads(json.dumps(fields, default=str)))


def _remove_run(folder: Path) -> None:
    """Remove what a run writes from its folder; all else there is somebody else's."""
    end_stopped(folder / PROCESSES)  # their pages go, by which the next watchdog would find them
    for name in WRITTEN:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


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


class StopRequested(BaseException):
    """SIGTERM has arrived while a run started; no error, so that nothing takes it for one."""


class StopSignal:
    """While entered, a SIGTERM asks the run to stop; a second one ends the process as usual.

    While the run starts, the first one raises StopRequested wherever the main thread is. After
    `begin` it sets `requested`, and the run ends its step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._error: BaseException | None = None
        self._begun = False
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        # Python sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def begin(self) -> None:
        """From now on there is a step to end. Raises StopRequested if a stop was asked for."""
        self._begun = True
        # Python drops what is raised inside a finaliser.
        if self.requested:
            raise StopRequested

    def ask(self) -> None:
        """Ask for a stop, as SIGTERM does, unless that was done; called from another thread."""
        if self._before is not None and not self.requested:
            _signal_main_thread()

    def fail(self, error: BaseException) -> bool:
        """Raise an error in the main thread, wherever it is; called from another one.

        Returns False where this was not entered in the main thread.
        """
        if self._before is None:
            return False
        self._error = error
        _signal_main_thread()
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.requested:  # a second one is no longer caught
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)
            return
        self.requested = True
        supervised.tell(supervised.STOPPING)
        if not self._begun:
            raise StopRequested


def _signal_main_thread() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)
