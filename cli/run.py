"""`hybridflow run`: runs all stages of a config, to the end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hybridflow.cli.arguments import add_config
from hybridflow.cli.statuses import STOPPED
from hybridflow.cli.supervising import supervise
from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.core.running import supervised
from hybridflow.settle.config.load import read_config
from hybridflow.settle.config.waiting import wait_briefly


class RunCommand(Command):
    """A plugin of kind "command", name "run"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        parser.add_argument(
            "--resume",
            action="store_true",
            help="go on from the newest checkpoint of this run's folder",
        )
        parser.add_argument(
            "--overwrite", action="store_true", help="replace the run that is in the folder"
        )

        parser.add_argument(
            "--stage", help="run this stage alone, from what the stages before it have left"
        )
        parser.add_argument(
            "--supervise",
            action="store_true",
            help="start the run again, from its newest checkpoint, whenever it has died",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the config; status 0 when it has finished, STOPPED when it was told to stop."""
        if arguments.resume and arguments.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")
        if arguments.supervise:
            return _supervise(arguments)

        supervised.begin()
        with _stoppable():
            # Before torch is imported, which is why the rest is imported here.
            tables, _ = read_config(arguments.config, arguments.overrides)
            wait_briefly(tables)
            from hybridflow.settle.launch import run

            outcome = run(
                arguments.config,
                arguments.overrides,
                arguments.resume,
                arguments.overwrite,
                arguments.stage,
            )
        return 0 if outcome.state == "finished" else STOPPED


@contextmanager
def _stoppable() -> Iterator[None]:
    """End this process by SIGTERM with STOPPED, before a run takes the signal and between two."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if supervised.stopping():  # a run that has begun got a second one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        sys.exit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _supervise(arguments: argparse.Namespace) -> int:
    """Run the config in a process of its own, and again when that has died."""
    command = [sys.executable, "-P", "-m", "hybridflow.cli.main", "run", arguments.config]
    if arguments.stage is not None:
        command += ["--stage", arguments.stage]
    first = [f"--{name}" for name in ("resume", "overwrite") if getattr(arguments, name)]
    return supervise([*command, *arguments.overrides], first, _say)


def _say(text: str) -> None:
    """Print a line. Where nobody reads it any more, the run is looked after all the same."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
