"""`hybridflow run`: runs all stages of a config, to the end."""

from __future__ import annotations

import argparse

from hybridflow.cli.arguments import add_config
from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
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

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the config; status 0 when it has finished, 3 when it was stopped before."""
        if arguments.resume and arguments.overwrite:
            raise ConfigError("--resume and --overwrite contradict each other; give one of them")

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
        return 0 if outcome.state == "finished" else 3
