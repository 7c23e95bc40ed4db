"""Our commands: each is there under its name, with its summary."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.cli import plugin
from hybridflow.cli.doctor import DoctorCommand
from hybridflow.cli.fork import ForkCommand
from hybridflow.cli.main import summary
from hybridflow.cli.new.command import NewCommand
from hybridflow.cli.plan import PlanCommand
from hybridflow.cli.plugins import PluginsCommand
from hybridflow.cli.reshard import ReshardCommand
from hybridflow.cli.run import RunCommand
from hybridflow.cli.runs import RunsCommand
from hybridflow.cli.show import ShowCommand
from hybridflow.cli.sweep import SweepCommand
from hybridflow.core.contracts.capabilities import CommandCapabilities


def command(target: type) -> Brought:
    name = target.__name__.removesuffix("Command").lower()
    return Brought("command", name, target, capabilities=CommandCapabilities(summary=summary(name)))


def test_every_command_is_there_under_its_name_with_the_summary_of_the_help():
    targets = (
        RunCommand,
        ForkCommand,
        RunsCommand,
        SweepCommand,
        PlanCommand,
        ShowCommand,
        ReshardCommand,
        PluginsCommand,
        NewCommand,
        DoctorCommand,
    )
    check_brought(plugin, *map(command, targets))
    for target in targets:
        said = command(target).capabilities.summary
        assert said[0].isupper() and said.endswith(".") and said.count(". ") == 0, (
            said
        )  # one sentence
