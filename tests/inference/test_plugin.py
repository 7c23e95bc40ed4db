"""The commands around a run: each is there under its name."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.inference import plugin
from hybridflow.inference.commands.chat import ChatCommand
from hybridflow.inference.commands.evaluate import EvaluateCommand
from hybridflow.inference.commands.export import ExportCommand
from hybridflow.inference.commands.generate import GenerateCommand
from hybridflow.inference.commands.serve import ServeCommand


def test_every_command_is_there_under_its_name():
    check_brought(
        plugin,
        evaluate=EvaluateCommand,
        export=ExportCommand,
        chat=ChatCommand,
        serve=ServeCommand,
        generate=GenerateCommand,
    )
