"""Three agents by clients of others, as they are, whose model may say anything.

They import their clients when they play: an environment of tests may have none.
"""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.steps import Watched
from helpers.templates import family
from helpers.trees import compare, recording
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import MODEL
from hybridflow.settle.stages import overlay

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
SHORT = 6
"""Limit of an answer, in tokens."""


def streams(model, row) -> None:
    """OpenAI's chat completions: tools, a stream, several answers, and on from one of them."""
    import openai

    client = openai.OpenAI(base_url=model.url, api_key=model.key)
    tools = [{"type": "function", "function": FUNCTION}]
    settings = {"model": "any", "tools": tools, "max_tokens": SHORT}
    said = [{"role": "user", "content": f"{row['a']} + {row['b']}?"}]
    chunks = client.chat.completions.create(messages=said, stream=True, **settings)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    text = "".join(delta.content or "" for delta in deltas)
    assert not any(delta.tool_calls for delta in deltas)
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    made = client.chat.completions.create(messages=said, n=2, **settings)
    said += [made.choices[1].message.model_dump(), {"role": "user", "content": "Bye"}]
    client.chat.completions.create(messages=said, **settings)


async def asks_at_once(model, row) -> None:
    """OpenAI's responses: calls at the same time, and on from each of the answers."""
    import openai

    client = openai.AsyncOpenAI(base_url=model.url, api_key=model.key)
    settings = {
        "model": "any",
        "max_output_tokens": SHORT,
        "tools": [{"type": "function", **FUNCTION}],
    }
    asked = (
        client.responses.create(input=f"{row['a']} + {row['b']}?", instructions=role, **settings)
        for role in ("Be brief.", "Be brief.", "Be long.")
    )
    for made in await asyncio.gather(*asked):
        await client.responses.create(
            input="Sure?", instructions=made.instructions, previous_response_id=made.id, **settings
        )


def branches(model, row) -> None:
    """Anthropic's messages: two threads that go on from one answer, one of them in a stream."""
    import anthropic

    client = anthropic.Anthropic(base_url=model.variables["ANTHROPIC_BASE_URL"], api_key=model.key)
    tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
    settings: dict[str, Any] = {"model": "any", "max_tokens": SHORT, "tools": [tool]}
    said = [{"role": "user", "content": f"{row['a']} + {row['b']}?"}]
    made = client.messages.create(messages=said, system="Add.", **settings)
    said.append({"role": "assistant", "content": made.content})

    def on(text: str) -> None:
        asked = {
            "messages": [*said, {"role": "user", "content": text}],
            "system": "Add.",
            **settings,
        }
        if text == "Why?":
            with client.messages.stream(**asked) as events:
                events.get_final_message()
        else:
            client.messages.create(**asked)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on, ("Why?", "Sure?")))


async def plays(model, row) -> float:
    """One of the three, as its row says."""
    kind = (row["a"] + row["b"]) % 3
    if kind == 0:
        await asks_at_once(model, row)
    else:
        await asyncio.to_thread((streams, branches)[kind - 1], model, row)
    return float(kind)


class Kept(Watched, GRPO):
    pass


SANDBOXED = """
import anthropic, openai, sys
question = open("question").read()
settings = {"model": "any", "max_tokens": 6}
said = [{"role": "user", "content": question}]
with openai.OpenAI() as client:
    made = client.chat.completions.create(messages=said, n=2, **settings)
    for choice in made.choices:
        more = [*said, choice.message.model_dump(), {"role": "user", "content": "Sure?"}]
        client.chat.completions.create(messages=more, stream=choice.index == 0, **settings)
with anthropic.Anthropic() as client:
    made = client.messages.create(messages=said, system="Add.", **settings)
    open("answer", "w").write(repr(made.content))
"""


def plays_in_a_sandbox(model, row) -> float:
    """A command that finds its clients' packages read-only, and the model behind its one door."""
    packages = {"PYTHONPATH": "/packages", "PYTHONDONTWRITEBYTECODE": "1"}
    with model.sandbox({"/packages": sysconfig.get_path("purelib")}, variables=packages) as box:
        box.write("question", f"{row['a']} + {row['b']}?")
        made = box.run(["python3", "-c", SANDBOXED])
        assert made.good, made
        return float(len(box.read("answer")) > 0)


def three_agents(
    folder: Path,
    rollout: Mapping[str, Any],
    model: Mapping[str, Any] = {},
    function: str = "plays",
    rows: int = 30,
) -> Sequence[int]:
    """Play episodes of the three, or of `function`, by an engine, and compare; (turns, sequences)."""
    tokenizer = family("qwen2.5")
    tokenizer.save(folder)
    end = int(tokenizer.encode("<|im_end|>")[0])
    config = {**MODEL, "vocab_size": 400, "max_position_embeddings": 1024, **model}
    tables = {
        "tokenizer": {"path": str(folder)},
        "actor": {
            "model": {"config": config},
            "micro_batch_tokens": 4000,
            "optimizer": {"lr": 1e-30},
        },
        "data": {"max_prompt_tokens": 256},
        "sampling": {"max_tokens": 700, "stop_tokens": [end]},
        "environment": {
            "name": "agent",
            "max_turns": 8,
            "at_once": rows,
            "options": {"function": f"{__name__}:{function}"},
        },
        "reward": {"function": "environment"},
    }
    algorithm = Kept(GRPOConfig(prompts_per_step=rows // 2, group_size=2))
    with TinyRun(algorithm, overlay(tables, {"rollout": dict(rollout)} if rollout else {})) as run:
        made = recording(run.worker("actor").engine)
        metrics = run.step()
        batch = run.algorithm.batch
    assert batch["outcome"].values == ["complete"] * rows
    assert metrics["actor/mismatch_mean"] < 1e-4 and metrics["actor/turns"] * rows == len(made)
    return len(made), compare(batch, made)
