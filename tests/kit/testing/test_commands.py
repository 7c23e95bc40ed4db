"""Every invariant of CommandConformance notices the fault that it is for."""

from __future__ import annotations

import pytest
from helpers.expect import caught, each_fault, each_invariant

from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.core.contracts.command import Command
from hybridflow.kit.testing.commands import CommandConformance


class Double(Command):
    capabilities = CommandCapabilities(summary="Doubles a number.")

    def add_arguments(self, parser):
        parser.add_argument("number", type=int, help="what is doubled")
        parser.add_argument("--verbose", action="store_true", help="say more")

    def run(self, arguments):
        return 2 * arguments.number


class SaysNothing(Double):
    capabilities = CommandCapabilities()


class HalfASentence(Double):
    capabilities = CommandCapabilities(summary="Doubles a number")


class TwoLines(Double):
    capabilities = CommandCapabilities(summary="Doubles a number.\nOr more.")


class SilentOption(Double):
    def add_arguments(self, parser):
        super().add_arguments(parser)
        parser.add_argument("--times", type=int)


FAULTS = {
    "test_it_says_what_it_does": [SaysNothing, HalfASentence, TwoLines],
    "test_its_arguments_can_be_shown_and_parsed": [SilentOption],
}


@each_fault(CommandConformance, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught(CommandConformance, method, command=fault())


@each_invariant(CommandConformance)
def test_a_good_command_passes(method):
    getattr(CommandConformance(), method)(Double())


def test_call_gives_the_exit_status_of_a_line_typed_by_a_user():
    assert CommandConformance.call(Double(), "21", "--verbose") == 42


@pytest.mark.parametrize("line", [(), ("x",), ("1", "--verb")])
def test_call_refuses_what_the_command_line_refuses(line, capsys):
    with pytest.raises(SystemExit):
        CommandConformance.call(Double(), *line)
    assert "usage:" in capsys.readouterr().err
