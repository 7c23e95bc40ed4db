"""CommandConformance: a command has a summary and arguments that argparse takes."""

from __future__ import annotations

import argparse

import pytest

from hybridflow.core.contracts.command import Command
from hybridflow.kit.testing.checks import missing_fixture, require


class CommandConformance:
    """Subclass it and give a fixture `command`: an instance of your Command."""

    @pytest.fixture
    def command(self) -> Command:
        """The author's command."""
        return missing_fixture(self, "command", "an instance of your Command")

    @staticmethod
    def call(command: Command, *arguments: str) -> int:
        """Run `hybridflow NAME ARGUMENTS` in this process, and return its exit status."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        command.add_arguments(parser)
        return command.run(parser.parse_args(arguments))

    def summary(self, command: Command) -> str:
        """Return the line that `hybridflow --help` prints for the command.

        Override it where a Descriptor has the capabilities.
        """
        return type(command).capabilities.summary

    def test_it_says_what_it_does(self, command):
        """The summary is one line and ends with a full stop."""
        summary = self.summary(command)
        require(
            summary and summary.endswith(".") and "\n" not in summary,
            got=repr(summary),
            expected="one sentence in capabilities = CommandCapabilities(summary=...)",
            likely="`hybridflow --help` prints it",
        )

    def test_its_arguments_can_be_shown_and_parsed(self, command):
        """argparse accepts the arguments, and each of them has a help text."""
        parser = argparse.ArgumentParser(prog="hybridflow", allow_abbrev=False)
        command.add_arguments(parser)
        page = parser.format_help()

        # argparse has no public list of a parser's arguments.
        undocumented = [action.dest for action in parser._actions if action.help is None]
        require(
            not undocumented,
            got=f"no help for {', '.join(undocumented)} in\n{page}",
            expected="help=... for each argument",
            likely="an argument was added without it",
        )
