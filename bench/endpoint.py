"""Agents that reach the model by the endpoint: 256 episodes with tools, and what a call costs the endpoint's process.

python bench/endpoint.py                      both parts; a minute
python bench/endpoint.py --only calls         what a call costs

episodes   256 free episodes of 4 turns, each with a tool that waits as drawn from a lognormal distribution (mean 0.2 s, sigma
           1, seed 0), beside the longer of two times: that of the slowest episode alone, and that of all tokens at the engine's
           rate. The engine is simulated: 64 places, then one for each episode, a token each per 10 ms; a turn has 200 tokens.
calls      processor time of the endpoint's process for a call with 20 messages, 2,000 tokens before the answer and 100 in it,
           64 at once; the model answers at once, and the clients are another process.

The agents speak HTTP themselves, as the clients of OpenAI and Anthropic take some milliseconds a call of their own. One JSON
line per figure; exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
from common import ROOT, emit

sys.path.insert(0, str(ROOT / "tests"))
from helpers.templates import family

from hybridflow.core.contracts.environment import Answer, Turn
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.kit.chat.conversation import Conversation
from hybridflow.kit.chat.endpoint import ADDRESS, endpoint
from hybridflow.kit.chat.rendering import ChatRenderer
from hybridflow.kit.continuous import ContinuousEngine
from hybridflow.kit.testing import one_rank

EPISODES, TURNS = 256, 4
MEAN_S, SIGMA = 0.2, 1.0
WAITS = np.random.default_rng(0).lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA, (EPISODES, TURNS))
"""Seconds of the tool after each turn."""
PLACES, STEP_S, TOKENS = (64, EPISODES), 0.01, 200
"""Places of the engine, seconds of its step, and tokens of a turn."""
AT_ONCE, CALLS = 64, 3200
MESSAGES, BEFORE, NEW = 20, 2000, 100
"""Of a call: its messages, and tokens before its answer and in it."""
TIMES, CALL_MS = 1.15, 3.0
"""The bars: over the longer of the two times, and processor milliseconds of a call."""
TOKENIZER = family("qwen2.5")
END = int(TOKENIZER.encode("<|im_end|>")[0])


def said(count: int) -> np.ndarray:
    """A turn of so many tokens."""
    return np.array([*TOKENIZER.encode("word " * count)[: count - 1], END])


TURN = said(TOKENS).tolist()


class Client:
    """Posts JSON over one connection that stays open."""

    def __init__(self, port: int, key: str):
        self.port, self.key = port, key
        self.streams: Any = None

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.streams is None:
            self.streams = await asyncio.open_connection(ADDRESS, self.port)
        reader, writer = self.streams
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {ADDRESS}\r\nAuthorization: Bearer {self.key}\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(headers.partition("content-length:")[2].partition("\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        assert " 200 " in headers.partition("\r\n")[0], answer
        return answer

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()


async def works(model: Any, row: Any) -> float:
    """An agent whose tool takes its time after each turn."""
    client = Client(int(model.url.split(":")[2].split("/")[0]), model.key)
    messages = [{"role": "user", "content": f"question {row['row']}"}]
    for turn in range(TURNS):
        answer = await client.post("/v1/chat/completions", {"messages": messages})
        await asyncio.sleep(WAITS[row["row"], turn])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"result {turn}"}]
    client.close()
    return 1.0


class Simulated(ContinuousEngine):
    """Makes a token per step for as many sequences as it has places."""

    places = 0

    def start(self) -> None:
        self.max_positions, self.vocab, self.version = None, TOKENIZER.vocab_size, 1
        self.left: dict[int, int] = {}

    def layout(self) -> Any:
        raise NotImplementedError("it has no weights")

    def receive(self, name: str, box: Any, tensor: Any) -> None:
        raise NotImplementedError("it has no weights")

    def enter(self, request: Request) -> None:
        self.left[request.id] = TOKENS

    def advance(self) -> Any:
        time.sleep(STEP_S)
        for number in list(self.left)[: self.places]:
            self.left[number] -= 1
            if not self.left[number]:
                del self.left[number]
                logprobs = [-0.5] * TOKENS
                yield self.completion(self.running[number], TURN, logprobs, "stop")

    def leave(self, ids: Any) -> Any:
        return ()


def episodes() -> bool:
    return all([played(places) for places in PLACES])


def played(places: int) -> bool:
    options = {"function": "endpoint:works"}
    section = EnvironmentSection("agent", TURNS + 1, options, free=True, at_once=EPISODES)
    sampling = SamplingParams(4000, stop_token_ids=(END,))
    requests = [Request(row, np.array([1]), sampling, row) for row in range(EPISODES)]
    metas = [{"row": row} for row in range(EPISODES)]
    endpoint()
    with one_rank() as context:
        engine = Simulated(None, None, context)
        engine.start()
        engine.places = places
        started, cpu = time.perf_counter(), time.process_time()
        batch = run_episodes(engine, requests, metas, Episodes(section, TOKENIZER), context)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert batch["outcome"].values == ["complete"] * EPISODES
    assert int((batch["turn"].values >= 0).sum()) == EPISODES * TURNS * TOKENS

    slowest = TURNS * TOKENS * STEP_S + float(WAITS.sum(1).max())
    rate = EPISODES * TURNS * TOKENS * STEP_S / places
    emit("the slowest episode", slowest, "s (computed)")
    emit("all tokens at the engine's rate", rate, "s (computed)")
    return emit(
        f"256 episodes with tools, {places} places", seconds, "s", ratio=seconds / max(slowest, rate),
        against="the longer of these",
        bar=TIMES, at_most=True, cpu=cpu,
    )  # fmt: skip


def held(number: int) -> tuple[Conversation, list[dict[str, Any]]]:
    """A conversation of as many messages as a call has, but its last one, and these."""

    def ask(answer: Answer) -> Future[Turn]:
        turn: Future[Turn] = Future()
        turn.set_result(Turn(0, text, ids, True, False, np.full(NEW, -0.5, np.float32)))
        return turn

    ids = said(NEW)
    text = TOKENIZER.decode(ids)
    conversation = Conversation(ChatRenderer(TOKENIZER), "hermes", ask)
    words = int(BEFORE / MESSAGES / len(TOKENIZER.encode("tool ")) * 1.06)
    messages: list[dict[str, Any]] = []
    while len(messages) < MESSAGES - 1:
        messages.append({"role": "user", "content": f"{number} " + "tool " * words})
        messages.append(dict(conversation.chat(messages).result().message))
    return conversation, messages[: MESSAGES - 1]


def calls() -> bool:
    conversations = [held(number) for number in range(AT_ONCE)]
    keys = [endpoint().open(conversation) for conversation, _ in conversations]
    given = json.dumps([endpoint().port, keys, [messages for _, messages in conversations]])
    asker = [sys.executable, __file__, "--ask"]
    with subprocess.Popen(
        asker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as clients:
        assert clients.stdin is not None and clients.stdout is not None
        clients.stdin.write(given + "\n")
        clients.stdin.flush()
        assert clients.stdout.readline() == "warm\n"
        cpu, started = time.process_time(), time.perf_counter()
        clients.stdin.write("go\n")
        clients.stdin.flush()
        before = json.loads(clients.stdout.readline())
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
    for key in keys:
        endpoint().close(key)
    emit("tokens before an answer", before, "")
    emit("calls in a second", CALLS / seconds, "")
    return emit("processor time of a call", cpu / CALLS * 1e3, "ms", bar=CALL_MS, at_most=True)


async def ask() -> None:
    """The clients' process: calls that each have another last message."""
    port, keys, held_by = json.loads(sys.stdin.readline())
    clients = [Client(port, key) for key in keys]

    async def one(number: int, count: int, mark: str) -> int:
        usage = 0
        for at in range(count):
            messages = [
                *held_by[number],
                {"role": "user", "content": f"{mark} {at} " + "tool " * 20},
            ]
            answer = await clients[number].post("/v1/chat/completions", {"messages": messages})
            usage = answer["usage"]["prompt_tokens"]
        return usage

    await asyncio.gather(*(one(number, 2, "warm") for number in range(AT_ONCE)))
    print("warm", flush=True)
    sys.stdin.readline()
    used = await asyncio.gather(*(one(n, CALLS // AT_ONCE, "go") for n in range(AT_ONCE)))
    print(float(np.mean(used)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("episodes", "calls"))
    parser.add_argument("--ask", action="store_true", help="be the clients' process")
    asked = parser.parse_args()
    if asked.ask:
        asyncio.run(ask())
        return 0
    parts = {"episodes": episodes, "calls": calls}
    met = [part() for name, part in parts.items() if asked.only in (None, name)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
