"""`hybridflow serve`: the endpoint of agents over a model, to try them before training."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path

from hybridflow.core.contracts.command import Command
from hybridflow.inference.commands.arguments import add_model
from hybridflow.settle.config.waiting import wait_briefly

LONGEST = 8192
"""Tokens of a conversation, if the model has positions for so many."""


class ServeCommand(Command):
    """A plugin of kind "command", name "serve"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser, "sampling.max_tokens=512")
        parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
        parser.add_argument(
            "--tools",
            default="hermes",
            metavar="FORM",
            help="the form of the model's calls of tools: hermes (the default), json or none",
        )
        parser.add_argument(
            "--plain",
            action="store_true",
            help="messages are their contents alone, without a chat template",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Serve until an interruption."""
        wait_briefly({})  # before torch is imported
        import attrs

        from hybridflow.core.errors import ConfigError
        from hybridflow.core.running.session import prepare
        from hybridflow.inference.engine import started
        from hybridflow.inference.job import on_one_device, resolve, with_overrides
        from hybridflow.inference.models import find_model
        from hybridflow.inference.serving import Desk
        from hybridflow.kit.chat.endpoint import Endpoint
        from hybridflow.kit.chat.parsing import FORMATS
        from hybridflow.kit.chat.rendering import ChatRenderer, PlainRenderer

        if arguments.tools not in FORMATS:
            raise ConfigError(f"--tools is {arguments.tools!r}; give one of {', '.join(FORMATS)}")
        found = find_model(arguments.model, arguments.step, arguments.stage, arguments.role)
        with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
            tables = on_one_device(found, Path(logs), arguments.engine)
            job = resolve(with_overrides(tables, arguments.overrides, found, LONGEST))
            tokenizer = prepare(job, sets={}).tokenizer
            renderer: ChatRenderer | PlainRenderer = PlainRenderer(tokenizer)
            if not arguments.plain:
                renderer = ChatRenderer(tokenizer, job.data.chat_template_kwargs)
                if remark := renderer.check("give --plain"):
                    print(f"hybridflow: {remark}", file=sys.stderr)
            sampling = job.sampling
            ends = dict.fromkeys((*sampling.stop_token_ids, tokenizer.eos_id))
            sampling = attrs.evolve(sampling, stop_token_ids=tuple(ends))
            room = job.data.max_prompt_tokens + sampling.max_tokens

            # A port that is taken is told before an engine starts.
            endpoint = Endpoint(arguments.port)
            with redirect_stdout(sys.stderr):
                engine = stack.enter_context(started(job))
            desk = Desk(engine, tokenizer, renderer, sampling, room, arguments.tools)
            variables = endpoint.variables(endpoint.open(desk))
            print(f"{found.label} at {endpoint.url}, until Ctrl-C; for a program's shell:")
            for name, value in variables.items():
                print(f"export {name}={value}")
            sys.stdout.flush()
            with suppress(KeyboardInterrupt):
                desk.serve(lambda: False)
            print(f"{desk.answered} answers", file=sys.stderr)
        return 0
