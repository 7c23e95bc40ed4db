"""The commands around a run: each is there under its name, with its summary."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.cli.main import summary
from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.inference import plugin
from hybridflow.inference.commands.chat import ChatCommand
from hybridflow.inference.commands.evaluate import EvaluateCommand
from hybridflow.inference.commands.export import ExportCommand
from hybridflow.inference.commands.generate import GenerateCommand


def command(target: type) -> Brought:
    name = target.__name__.removesuffix("Command").lower()
    return Brought("command", name, target, capabilities=CommandCapabilities(summary=summary(name)))


def test_every_command_is_there_under_its_name_with_the_summary_of_the_help():
    check_brought(
        plugin, *map(command, (EvaluateCommand, ExportCommand, ChatCommand, GenerateCommand))
    )
