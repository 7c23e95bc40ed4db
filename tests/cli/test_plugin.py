"""Our commands: each is there under its name."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.cli import plugin
from hybridflow.cli.doctor import DoctorCommand
from hybridflow.cli.fork import ForkCommand
from hybridflow.cli.new.command import NewCommand
from hybridflow.cli.plan import PlanCommand
from hybridflow.cli.plugins import PluginsCommand
from hybridflow.cli.reshard import ReshardCommand
from hybridflow.cli.run import RunCommand
from hybridflow.cli.runs import RunsCommand
from hybridflow.cli.show import ShowCommand
from hybridflow.cli.stacks import StacksCommand
from hybridflow.cli.sweep import SweepCommand


def test_every_command_is_there_under_its_name():
    check_brought(
        plugin,
        run=RunCommand,
        fork=ForkCommand,
        runs=RunsCommand,
        stacks=StacksCommand,
        sweep=SweepCommand,
        plan=PlanCommand,
        show=ShowCommand,
        reshard=ReshardCommand,
        plugins=PluginsCommand,
        new=NewCommand,
        doctor=DoctorCommand,
    )
