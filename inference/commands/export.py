"""`hybridflow export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.inference.commands.arguments import add_model
from hybridflow.settle.config.waiting import wait_briefly

DTYPES = ("auto", "float32", "bfloat16", "float16")


class ExportCommand(Command):
    """A plugin of kind "command", name "export"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser, "tokenizer.path=FOLDER", engine=False)
        parser.add_argument(
            "--out", required=True, type=Path, help="the folder to write; it must be new"
        )
        parser.add_argument(
            "--dtype",
            choices=DTYPES,
            default="auto",
            help="of the weights; auto: as the run computed, or as the folder has them",
        )

        parser.add_argument(
            "--adapter",
            action="store_true",
            help="only the adapters (LoRA) that the run trained, in float32, as peft reads them; "
            "without it they are merged with the model",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Write weights, configs, tokenizer and model card; say where."""
        if arguments.out.exists() and any(arguments.out.iterdir()):
            raise ConfigError(f"{arguments.out}: is not empty; give a folder that is new")
        if arguments.adapter and arguments.dtype != "auto":
            raise ConfigError("--dtype: adapters are written in float32; leave it out")
        wait_briefly({})  # before torch is imported
        from hybridflow.inference.exporting import export, export_adapter
        from hybridflow.inference.models import find_model

        found = find_model(arguments.model, arguments.step, arguments.stage, arguments.role)
        out = arguments.out
        with tempfile.TemporaryDirectory() as logs:
            if arguments.adapter:
                export_adapter(found, out, Path(logs), arguments.overrides)
                dtype = "adapters, float32"
            else:
                dtype = export(found, out, arguments.dtype, Path(logs), arguments.overrides)
        print(f"{found.label}: {arguments.out} ({dtype})")
        return 0
