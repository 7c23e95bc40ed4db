"""CommandConformance: a command has a summary and arguments that argparse takes."""

from __future__ import annotations

import argparse

import pytest

from hybridflow.core.contracts.command import Command
from hybridflow.kit.testing.checks import missing_fixture, require


class CommandConformance:
    """Give a fixture `command`: an instance of your Command."""

    @pytest.fixture
    def command(self) -> Command:
        return missing_fixture(self, "command", "an instance of your Command")

    @staticmethod
    def call(command: Command, *arguments: str) -> int:
        """The exit status of `hybridflow NAME ARGUMENTS`."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        command.add_arguments(parser)
        return command.run(parser.parse_args(arguments))

    def summary(self, command: Command) -> str:
        """What `hybridflow --help` prints of it; override it where a Descriptor has the capabilities."""
        return type(command).capabilities.summary

    def test_it_says_what_it_does(self, command):
        said = self.summary(command)
        require(
            said and said.endswith(".") and "\n" not in said,
            got=repr(said),
            expected="one sentence in capabilities = CommandCapabilities(summary=...)",
            likely="`hybridflow --help` prints it",
        )

    def test_its_arguments_can_be_shown_and_parsed(self, command):
        parser = argparse.ArgumentParser(prog="hybridflow", allow_abbrev=False)
        command.add_arguments(parser)
        shown = parser.format_help()
        undocumented = [a.dest for a in parser._actions if a.help is None]
        require(
            not undocumented,
            got=f"no help for {', '.join(undocumented)} in\n{shown}",
            expected="help=... for each argument",
            likely="an argument was added without it",
        )
