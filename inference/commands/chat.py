"""`hybridflow chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import DataError
from hybridflow.inference.commands.arguments import add_model
from hybridflow.settle.config.waiting import wait_briefly

if TYPE_CHECKING:
    from hybridflow.inference.talk import Talk

LONGEST = 8192
"""Tokens of a conversation, if the model has positions for so many."""
HELP = "/system TEXT tells the model something first, /reset forgets, /quit or Ctrl-D ends"


class ChatCommand(Command):
    """A plugin of kind "command", name "chat"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser, "sampling.max_tokens=512")
        parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
        parser.add_argument("--greedy", action="store_true", help="the most likely token each time")
        parser.add_argument(
            "--plain", action="store_true", help="each line is a prompt, without a chat template"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Answer line after line, until the input ends."""
        wait_briefly({})  # before torch is imported
        import attrs

        from hybridflow.core.running.session import prepare
        from hybridflow.inference.engine import started
        from hybridflow.inference.job import on_one_device, resolve, with_overrides
        from hybridflow.inference.models import find_model
        from hybridflow.inference.talk import Talk, has_template

        found = find_model(arguments.model, arguments.step, arguments.stage, arguments.role)
        with tempfile.TemporaryDirectory() as logs:
            tables = on_one_device(found, Path(logs), arguments.engine)
            job = resolve(with_overrides(tables, arguments.overrides, found, LONGEST))
            tokenizer = prepare(job, sets={}).tokenizer
            sampling = job.sampling
            if arguments.greedy:
                sampling = attrs.evolve(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
            ends = dict.fromkeys((*sampling.stop_token_ids, tokenizer.eos_id))
            sampling = attrs.evolve(sampling, stop_token_ids=tuple(ends))

            # Without a chat template, each line is a prompt by itself.
            plain = arguments.plain or not has_template(tokenizer)
            with ExitStack() as stack:
                # An engine's start-up messages must not mix with the answers on stdout.
                with redirect_stdout(sys.stderr):
                    engine = stack.enter_context(started(job))
                room = job.data.max_prompt_tokens + sampling.max_tokens
                talk = Talk(engine, tokenizer, sampling, job.data, plain, room, arguments.system)
                print(f"{found.label}: {_how(talk)}; {HELP}", file=sys.stderr)
                converse(talk)
        return 0


def _how(talk: Talk) -> str:
    """Return in words how a line of input becomes a prompt."""
    if not talk.plain:
        return "a conversation by the model's chat template"
    if talk.data.prompt != "{prompt}":
        return f"each line is a prompt by itself, as {talk.data.prompt!r}"
    return "each line is a prompt by itself"


def converse(talk: Talk) -> None:
    """Read lines, and print what the model answers; an interruption ends an answer."""
    terminal = sys.stdin.isatty()
    if terminal:
        import_module("readline")  # lines can be edited, and come back with the arrows
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            continue
        if not line:
            continue
        if line.startswith("/"):
            if line.split()[0] == "/quit":
                break
            _obey(talk, line)
            continue
        try:
            for piece in talk.answer(line):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            talk.engine.disown()
            print(" ...", end="")
        except DataError as error:
            print(f"hybridflow: {error}", end="", file=sys.stderr)
        print(flush=True)


def _obey(talk: Talk, line: str) -> None:
    """Run a command of the conversation: a line that begins with a slash."""
    command, _, text = line.partition(" ")
    if command == "/system":
        talk.system = text.strip() or None
        talk.reset()
        if talk.plain:
            print("a model without a chat template is told nothing first", file=sys.stderr)
    elif command == "/reset":
        talk.reset()
    else:
        print(HELP, file=sys.stderr)
