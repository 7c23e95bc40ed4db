"""Agents that go on from wherever they like: what is trained is what was sampled, behind what had stood before it.

What stood before each turn of a scripted sampler, in the place of the engine, is written down. Then every sequence of the
batch, as the trainer computes them, is compared with that. The templates of six families, written for these tests, are in
helpers/templates.py.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from helpers.paths import EVERY
from helpers.templates import FAMILIES, WITH_TOOLS, family
from helpers.trees import compare, recording

from hybridflow.core.contracts.rollout import Completion, Request, SamplingParams
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.kit.testing import one_rank

ROWS = 1667 if EVERY else 12
"""Episodes of each family; 10,000 in all with HYBRIDFLOW_MATRIX."""
CALLS = 7
REWRITES = ("qwen3", "mistral", "phi4")
"""Families whose templates write earlier turns differently once others follow."""
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
asked: dict[str, list[list[dict]]] = {}
"""What agents have sent, by row, where all of the model's turns in it are whole texts."""


def text(draws: random.Random) -> str:
    letters = "".join(draws.choice("ab1 <>\n{é☃") for _ in range(draws.randrange(8)))
    # Some templates remove spaces at the ends of a text.
    return letters.strip() + draws.choice("xyz?")


async def wanders(model, row):
    """Goes on from a conversation, begins one, or asks again, as drawn."""
    draws = random.Random(row["name"])
    tools = [TOOL] if row["tools"] and draws.random() < 0.5 else []
    held: list[list[dict]] = []
    """Conversations that can be gone on from."""
    questions: list[list[dict]] = []

    async def ask(said: list[dict]) -> None:
        questions.append(said)
        reply = await model.chat(said, tools, max_tokens=draws.choice([None, None, 3]))
        held.append([*said, reply.message])
        whole = not any(one.get("tool_calls") or one.get("cut") for one in said)
        if whole:
            asked.setdefault(row["name"], []).append(said)
        held[-1][-1]["cut"] = reply.finish_reason == "length"

    def drawn() -> list[dict]:
        kind = draws.random()
        if questions and kind < 0.2:
            return draws.choice(questions)
        if not held or kind < 0.35:
            return [{"role": "user", "content": text(draws)}]
        before = draws.choice(held)
        calls = before[-1].get("tool_calls", ())
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": text(draws)}
            for call in calls
        ]
        return [*before, *(results or [{"role": "user", "content": text(draws)}])]

    for _ in range(CALLS - 2):
        await ask(drawn())
    await asyncio.gather(*(ask(said) for said in (drawn(), drawn())))
    return 1.0


class Sampler:
    """Answers each request with a drawn text, or a call."""

    def __init__(self, tokenizer, end: int, tools: bool):
        self.tokenizer, self.end, self.tools = tokenizer, end, tools
        self.draws = random.Random(0)
        self.nudge = None

    def generate(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request) -> Completion:
        said = text(self.draws)
        if self.tools and self.draws.random() < 0.3:
            said = (
                '<tool_call>\n{"name": "add", "arguments": {"x": "é"}}\n</tool_call>'
                * self.draws.choice((1, 2))
            )
        prefix = len(request.prefix_ids)
        ids = [*self.tokenizer.encode(said).tolist(), self.end]
        reason = "stop"
        if len(ids) > request.sampling.max_tokens - prefix:
            ids, reason = ids[: request.sampling.max_tokens - prefix], "length"
        logprobs = [-self.draws.random() for _ in ids]
        return Completion(
            request.id,
            np.array([*request.prefix_ids, *ids]),
            np.array([*request.prefix_logprobs, *logprobs]),
            np.array([*request.prefix_versions, *[1] * len(ids)]),
            reason,
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_is_what_was_sampled_behind_what_had_stood_before_it(name):
    asked.clear()
    tokenizer = family(name)
    [end] = tokenizer.encode(FAMILIES[name][2]).tolist()
    sampler = Sampler(tokenizer, end, name in WITH_TOOLS)
    made = recording(sampler)
    options = {"function": f"{__name__}:wanders"}
    spec = Episodes(EnvironmentSection("agent", CALLS + 1, options, at_once=ROWS), tokenizer)
    sampling = SamplingParams(4000, stop_token_ids=(end,))
    requests = [Request(row, np.array([1]), sampling, seed=row) for row in range(ROWS)]
    metas = [{"name": f"{name}{row}", "tools": name in WITH_TOOLS} for row in range(ROWS)]
    with one_rank() as context:
        batch = run_episodes(sampler, requests, metas, spec, context)
    assert batch["outcome"].values == ["complete"] * ROWS
    assert len(made) == CALLS * ROWS

    compare(batch, made)

    if name in REWRITES:
        return
    # What had stood there is what transformers renders of the agent's messages.
    stood = {(row, tokenizer.decode(before, skip_special=False)) for row, before, *_ in made}
    for row in range(ROWS):
        for said in asked[f"{name}{row}"]:
            for tools in ([TOOL], None) if name in WITH_TOOLS else (None,):
                rendered = tokenizer.hf.apply_chat_template(
                    said, tools=tools, tokenize=False, add_generation_prompt=True
                )
                if (row, rendered) in stood:
                    break
            else:
                raise AssertionError(f"row {row} never stood behind {rendered!r}")
