"""The command `hybridflow`. Its subcommands are plugins of kind "command", our own ones too.

Only the command that is asked for is imported: the others show their summary alone.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from hybridflow.cli.statuses import INTERRUPTED, status_of
from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import HybridFlowError, PluginError
from hybridflow.core.names import did_you_mean, reason
from hybridflow.core.plugins import registry

FULL = "free disk space, and go on with --resume"
DENIED = "choose a folder of yours (run.folder, --out)"
OTHER_NAME = "give another name or folder (run.name, run.folder, --out)"
ADVICE = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: DENIED,
    errno.ENAMETOOLONG: OTHER_NAME,
    errno.ENOTDIR: OTHER_NAME,
    errno.EISDIR: OTHER_NAME,
    errno.EIO: "the disk does not read or write; copy the run's folder to another one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""What the system may refuse -> what a user does about it."""


def script() -> int:
    """Run the command that was typed; return its exit status, also to a second Ctrl-C."""
    status = main()
    # What is left is tidying up. At its very end Python would take our handler away.
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; return its exit status.

    Errors meant for the user become a message and status 1, an interruption status 130.
    """
    given = list(sys.argv[1:] if argv is None else argv)

    # So that "my_file:my_reward" is found here; last, so that it hides no package.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())

    try:
        command, arguments = _parse(given)
        with _with_advice():
            return command.run(arguments)
    except HybridFlowError as error:
        print(f"hybridflow: {error}", file=sys.stderr)
        return status_of(error)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("hybridflow: interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def _with_advice() -> Iterator[None]:
    """Raise HybridFlowError with advice in the place of what the system refuses the user."""
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        where = f": {error.filename}" if error.filename else ""
        raise HybridFlowError(f"{error.strerror}{where}; {ADVICE[error.errno]}") from error


def _parse(given: list[str]) -> tuple[Command, argparse.Namespace]:
    """Return the command and its arguments.

    Overrides may stand before, between and after options, which argparse alone does not take.
    Raises PluginError for a command that does not load; ends the process for --help and for wrong
    usage.
    """
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        description="Reinforcement learning of language models.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"hybridflow {version('hybridflow')}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    # The first word that is not an option names the command. It alone is loaded, to declare its
    # arguments.
    name = next((text for text in given if not text.startswith("-")), None)
    command = _load(parser, name) if name is not None else None
    for registered in registry().names("command"):
        text = summary(registered).replace("%", "%%")  # argparse puts figures into its texts
        own = commands.add_parser(registered, help=text, description=text, allow_abbrev=False)
        if registered == name and command is not None:
            _started(name, partial(command.add_arguments, own))

    # Arguments that argparse does not know are overrides, if the command takes any.
    arguments, rest = parser.parse_known_args(given)
    unknown = [text for text in rest if text.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        hint = ""
        if "=" in unknown[0]:
            hint = f"; overrides have no dashes: {unknown[0].lstrip('-')}"
        parser.error(f"unknown argument {unknown[0]}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]

    assert command is not None  # argparse requires one
    return command, arguments


def _load(parser: argparse.ArgumentParser, name: str) -> Command:
    """Return the command of this name. Raises PluginError if it does not load."""
    names = {entry.name for entry in registry().entries() if entry.kind == "command"}
    if name not in names:
        parser.error(
            f"unknown command {name!r}{did_you_mean(name, names)} "
            f"(commands: {', '.join(sorted(names))})"
        )
    # Only now is the command's own module imported.
    command_class: type[Command] = registry().get("command", name)
    return _started(name, command_class)


def _started(name: str, work: Callable[[], Any]) -> Any:
    """Return `work()` of the command `name`.

    Raises PluginError where it raises: a traceback through a plugin's code would not help users.
    """
    try:
        return work()
    except Exception as error:
        raise PluginError(f"the command {name!r} does not start: {reason(error)}") from error


def summary(name: str) -> str:
    """Return a sentence on what a command does; for one that does not load, the reason."""
    try:
        can = registry().capabilities("command", name)
    except HybridFlowError as error:
        return f"does not load: {error}"
    return can.summary if isinstance(can, CommandCapabilities) else ""


if __name__ == "__main__":
    sys.exit(script())
