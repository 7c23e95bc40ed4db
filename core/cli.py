"""The command `hybridflow`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridflow.core.errors import ConfigError, HybridFlowError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn errors meant for the user into a message and exit status 1."""
    arguments = _parser().parse_args(argv)
    if "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that "my_file:my_reward" is found
    try:
        return arguments.command(arguments)
    except HybridFlowError as error:
        print(f"hybridflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hybridflow: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridflow", description="Reinforcement learning of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        return command

    for name, function, text in (
        ("run", _run, "Run a config: all stages, to the end."),
        ("show", _show, "Print every resolved value of a config with where it came from, and what follows from it."),
    ):
        command = add(name, function, text)
        command.add_argument("config", help="a TOML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="for example actor.optimizer.lr=1e-5")
    run = commands.choices["run"]
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint of this run's folder")
    run.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    plugins = add("plugins", _plugins, "List plugins: kind, name, package, version, capabilities, state.")
    plugins.add_argument("kind", nargs="?", help="only this kind")
    plugins.add_argument("--capabilities", action="store_true", help="show what each can do")
    add("doctor", _doctor, "Say what is installed, what works on this machine, and what each plugin still needs.")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from hybridflow.core.launch import run

    if arguments.resume and arguments.overwrite:
        raise ConfigError("--resume and --overwrite contradict each other; give one of them")
    outcome = run(arguments.config, arguments.overrides, arguments.resume, arguments.overwrite)
    return 0 if outcome.state == "finished" else 3


def _show(arguments: argparse.Namespace) -> int:
    from hybridflow.core.show import show

    show(Path(arguments.config), arguments.overrides)
    return 0


def _plugins(arguments: argparse.Namespace) -> int:
    from hybridflow.core.listing import list_plugins

    list_plugins(arguments.kind, arguments.capabilities)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from hybridflow.core.listing import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
