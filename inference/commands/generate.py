"""`hybridflow generate`: responses to prompts, as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.inference.commands.arguments import add_model
from hybridflow.settle.config.waiting import wait_briefly

if TYPE_CHECKING:
    import numpy as np

    from hybridflow.core.context import GroupStepContext
    from hybridflow.core.contracts.data_source import DataConfig
    from hybridflow.core.contracts.tokenizer import Tokenizer

AT_ONCE = 1024
"""Responses of one call."""


class GenerateCommand(Command):
    """A plugin of kind "command", name "generate"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser, "sampling.temperature=0.7")
        parser.add_argument("--text", action="append", default=[], help="a prompt; again for more")
        parser.add_argument("--prompts", metavar="FILE", help="rows with prompts, as [data] reads")
        parser.add_argument("--samples", type=int, default=1, help="responses to each prompt")
        parser.add_argument("--greedy", action="store_true", help="the most likely token each time")
        parser.add_argument("--logprobs", action="store_true", help="tokens and their logprobs too")
        parser.add_argument(
            "--plain", action="store_true", help="--text as it is, without a chat template"
        )
        parser.add_argument("--out", type=Path, help="file for the lines; default: printed")

    def run(self, arguments: argparse.Namespace) -> int:
        """Generate, and write a JSON line for each response, in the prompts' order."""
        if bool(arguments.text) == (arguments.prompts is not None):
            raise ConfigError("generate: give prompts, either --text or --prompts FILE")
        if arguments.samples < 1:
            raise ConfigError(f"--samples: is {arguments.samples}; give 1 or more")
        wait_briefly({})  # before torch is imported
        from hybridflow.core.data.examples import ExampleSet
        from hybridflow.core.plugins.resolve import load_source
        from hybridflow.core.running.session import Session, prepare
        from hybridflow.inference.job import inference_tables, resolve, with_data, with_overrides
        from hybridflow.inference.models import find_model
        from hybridflow.inference.talk import has_template

        found = find_model(arguments.model, arguments.step, arguments.stage, arguments.role)
        with tempfile.TemporaryDirectory() as logs:
            tables = inference_tables(found, Path(logs) / "logs", arguments.engine)
            if arguments.prompts is not None:
                tables = with_data(tables, arguments.prompts)
                # Only prompts are read, not the responses that the data may have.
                tables["data"] |= {"shuffle": False, "answer": None, "response": None}
            job = resolve(with_overrides(tables, arguments.overrides, found))
            prepared = prepare(job, sets={})
            tokenizer = prepared.tokenizer

            if arguments.prompts is not None:
                examples = ExampleSet(load_source(job.data), job.data, tokenizer)
                examples.check()
                prompts = [examples[at].prompt_ids for at in range(len(examples))]
            else:
                plain = arguments.plain or not has_template(tokenizer)
                if plain and job.data.prompt != "{prompt}":
                    _say(f"each text is put into data.prompt, {job.data.prompt!r}")
                prompts = [_prompt(text, tokenizer, job.data, plain) for text in arguments.text]

            with ExitStack() as stack:
                file = sys.stdout
                if arguments.out:
                    file = stack.enter_context(open(arguments.out, "w"))
                # An engine's start-up messages must not mix with the output's lines.
                stack.enter_context(redirect_stdout(sys.stderr))
                session = stack.enter_context(Session(job, prepared, _say))
                ctx = session.context()
                size = max(1, AT_ONCE // arguments.samples)
                for start in range(0, len(prompts), size):
                    for line in _lines(ctx, tokenizer, prompts[start : start + size], arguments):
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    file.flush()
        return 0


def _prompt(text: str, tokenizer: Tokenizer, data: DataConfig, plain: bool) -> np.ndarray:
    """Return the tokens of a text: by the data's own template, or as a chat's first message."""
    from hybridflow.inference.talk import text_ids

    if plain:
        return text_ids(text, tokenizer, data)
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, (), data.chat_template_kwargs)


def _say(text: str) -> None:
    """Print progress to stderr, as stdout has the lines, which may be piped."""
    print(text, file=sys.stderr)


def _lines(
    ctx: GroupStepContext, tokenizer: Tokenizer, prompts: list[Any], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Generate responses to some prompts; return the JSON object of each."""
    import torch

    from hybridflow.core.values.batch import Batch
    from hybridflow.core.values.columns import tokens

    batch = Batch(
        {
            "prompt_ids": tokens(prompts, torch.int64),
            "group": torch.arange(len(prompts)),
            "meta": [{} for _ in prompts],
        }
    )
    made = ctx.actor.generate(batch.repeat(arguments.samples), greedy=arguments.greedy)
    lines = []
    for prompt, response, logprobs, reason in zip(
        made["prompt_ids"],
        made["response_ids"],
        made["rollout_logprobs"],
        made["finish_reason"].values,
        strict=True,
    ):
        line: dict[str, Any] = {
            "prompt": tokenizer.decode(prompt.numpy()),
            "response": tokenizer.decode(response.numpy()),
            "finish_reason": reason,
        }
        if arguments.logprobs:
            line |= {"response_ids": response.tolist(), "logprobs": logprobs.tolist()}
        lines.append(line)
    ctx.finish()
    return lines
