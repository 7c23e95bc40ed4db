"""Agents in the episodes of a real engine, and what becomes of those that fail, hang or go on too long."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import numpy as np
import openai
import pytest
import torch
from helpers.episodes import END, STOP_ID, request
from helpers.programs import ends, run as isolates
from helpers.sources import char
from helpers.steps import Watched
from helpers.templates import family
from helpers.waiting import eventually
from openai.types.chat.chat_completion import Choice

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.backends.agents.environment import THREAD, AgentEnvironment
from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.errors import ConfigError, EnvironmentFailure
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.kit.chat.conversation import EpisodeOver
from hybridflow.kit.sandbox.process import SandboxError
from hybridflow.kit.testing import TinyRun
from hybridflow.kit.testing.runs import MODEL

DIGITS = char()
heard: dict[str, list] = {}
"""What agents have got, by the prompt's text."""


async def counts(model, row):
    """Three turns; sends the number of its turn."""
    said = [{"role": "user", "content": f"{row['prompt']}+"}]
    for number in range(3):
        reply = await model.chat(said, max_tokens=2)
        heard.setdefault(row["name"], []).append(reply)
        said += [reply.message, {"role": "user", "content": f"{number}+"}]
    return 1.5


def counts_in_a_thread(model, row):
    said = [{"role": "user", "content": f"{row['prompt']}+"}]
    for number in range(3):
        reply = model.chat(said, max_tokens=2)
        heard.setdefault(row["name"], []).append(reply)
        said += [reply.message, {"role": "user", "content": f"{number}+"}]
    return 1.5


def play(speaker, function, rows: int = 6, max_tokens: int = 64, **settings):
    options = {"function": f"{__name__}:{function}", "chat": "plain", "tools": "none"}
    spec = Episodes(EnvironmentSection("agent", 8, options, **settings), DIGITS)
    asked = [request(max_tokens, at=at) for at in range(rows)]
    return run_episodes(
        speaker[0], asked, [{"name": str(at)} for at in range(rows)], spec, speaker[1]
    )


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("function", ["counts", "counts_in_a_thread"])
def test_an_agent_and_its_model_take_turns(speaker, function, free):
    heard.clear()
    made = play(speaker, function, free=free)
    assert made["outcome"].values == ["complete"] * 6
    assert made["turn_rewards"].values == [[0.0, 0.0, 1.5]] * 6
    assert [DIGITS.decode(ids) for ids in made["prompt_ids"]] == ["1+2+"] * 6
    for row in range(6):
        ids, mask, logprobs = (
            list(made[name])[row] for name in ("response_ids", "loss_mask", "rollout_logprobs")
        )
        replies = heard[str(row)]
        # What is trained is what was sampled, token by token, and what the agent got.
        assert ids[mask.bool()].tolist() == [int(one) for reply in replies for one in reply.ids]
        assert logprobs[mask.bool()].tolist() == [
            float(one) for reply in replies for one in reply.logprobs
        ]
        # Between the turns stands what it sent, as tokens of their own.
        texts = [DIGITS.encode(f"{number}+").tolist() for number in range(2)]
        expected = [
            int(token)
            for reply, text in zip(replies, [*texts, []], strict=True)
            for token in [*reply.ids, *text]
        ]
        assert ids.tolist() == expected
        for reply in replies:
            ended = int(reply.ids[-1]) in (END, STOP_ID)
            assert reply.finish_reason == ("stop" if ended else "length") and len(reply.ids) <= 2
    assert not [one for one in threading.enumerate() if one.name == THREAD]


STOPS = ["11", "12", "5", "6", "7", "8", "9", "+1"]


async def is_a_client(model, row):
    """As `counts`, by OpenAI's client."""
    client = openai.AsyncOpenAI(base_url=model.url, api_key=model.key)
    said = [{"role": "user", "content": f"{row['prompt']}+"}]
    for number in range(2):
        made = await client.chat.completions.create(
            model="m", messages=said, max_tokens=4, stop=STOPS, logprobs=True
        )
        heard.setdefault(row["name"], []).append(made.choices[0])
        said += [made.choices[0].message, {"role": "user", "content": f"{number}+"}]
    heard.setdefault("keys", []).append((model.url, model.key))
    return 1.5


PROGRAM = """
import json, os, urllib.request
said = [{"role": "user", "content": "1+2+"}]
for number in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": said, "max_tokens": 4, "stop": os.environ["STOPS"].split(), "logprobs": True}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    choice = json.load(urllib.request.urlopen(request))["choices"][0]
    print(json.dumps(choice))
    said += [choice["message"], {"role": "user", "content": f"{number}+"}]
"""


def is_a_program(model, row):
    made = subprocess.run(
        [sys.executable, "-Ic", PROGRAM],
        env={**model.variables, "STOPS": " ".join(STOPS)},
        capture_output=True,
        text=True,
        check=True,
    )
    heard[row["name"]] = [Choice.model_validate_json(line) for line in made.stdout.splitlines()]
    heard.setdefault("keys", []).append((model.url, model.key))
    return 1.5


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("function", ["is_a_client", "is_a_program"])
def test_a_program_that_knows_nothing_of_us_plays_by_its_own_client(speaker, function, free):
    heard.clear()
    made = play(speaker, function, rows=4, free=free)
    assert made["outcome"].values == ["complete"] * 4
    stopped = 0
    for row in range(4):
        ids, mask, logprobs = (
            list(made[name])[row] for name in ("response_ids", "loss_mask", "rollout_logprobs")
        )
        choices = heard[str(row)]
        told = [one for choice in choices for one in choice.logprobs.content]
        # Every token that the client was told of, and no other, is trained.
        assert [DIGITS.decode([token]) for token in ids[mask.bool()]] == [one.token for one in told]
        assert logprobs[mask.bool()].tolist() == pytest.approx([one.logprob for one in told])
        sent = ids[~mask.bool()]
        assert DIGITS.decode(sent) == "0+"
        for choice in choices:
            text = "".join(one.token for one in choice.logprobs.content)
            content = choice.message.content
            assert text == content or text.removeprefix(content) in STOPS
            assert not [stop for stop in STOPS if stop in content]
            stopped += text != content
    assert stopped
    # The keys have ended with their episodes.
    assert len(set(heard["keys"])) == 4
    for url, key in heard["keys"]:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key=key).models.list()


async def gives_up(model, row):
    """Ends while a turn is made that it no longer waits for; the turn before was ended by a stop."""
    said = [{"role": "user", "content": f"{row['prompt']}+"}]
    first = await model.chat(said, max_tokens=6, stop=["1", "2", "3", "4", "+"])
    more = [*said, first.message, {"role": "user", "content": "1+"}]
    asked = asyncio.ensure_future(model.chat(more, max_tokens=1))
    await asyncio.sleep(0.1)
    asked.cancel()
    heard.setdefault(row["name"], []).append(first)
    return 1.0


@pytest.mark.parametrize("free", [False, True])
def test_an_agent_may_end_while_a_turn_is_made_that_it_has_given_up(speaker, free):
    heard.clear()
    made = play(speaker, "gives_up", rows=8, free=free)
    assert made["outcome"].values == ["complete"] * 8
    stopped = 0
    for row, (ids, mask) in enumerate(zip(made["response_ids"], made["loss_mask"], strict=True)):
        [first] = heard[str(row)]
        stopped += first.stop is not None and len(first.ids) > 1
        # The first turn as it was cut, and a token of the second.
        assert mask.tolist() == [1] * len(first.ids) + [0, 0, 1]
        assert ids[: len(first.ids)].tolist() == first.ids.tolist()
    assert stopped


def fails(model, row):
    if row["name"] != "1":
        return None
    model.chat([{"role": "user", "content": "1+"}])
    raise OSError("no such file")


def forgets(model, row):
    said = [{"role": "user", "content": "1+"}]
    reply = model.chat(said, max_tokens=1)
    return model.chat([*said, reply.message])  # without a message after the model's answer


def wrong(model, row):
    return "1"


async def exits(model, row):
    sys.exit("no more")


def exits_in_a_thread(model, row):
    sys.exit("no more")


def stops_iterating(model, row):
    return next(iter(()))


async def cancels(model, row):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "raised OSError: no such file"),
        ("forgets", "raised AgentError: the last message is the model's own"),
        ("exits", "raised SystemExit: no more"),
        ("exits_in_a_thread", "raised SystemExit: no more"),
        ("stops_iterating", "StopIteration"),
        ("cancels", "raised AgentError: the agent was cancelled"),
        ("wrong", "raised TypeError: the agent returned '1'; return a finite number, or None"),
    ],
)
def test_an_agent_that_fails_is_a_failure_of_its_episode_alone(speaker, function, said):
    with pytest.raises(EnvironmentFailure, match=said):
        play(speaker, function)
    made = play(speaker, function, on_failure=FailureRule(mask=True))
    outcomes = made["outcome"].values
    assert outcomes[1].startswith("failed_")
    if function == "fails":
        assert outcomes[0] == outcomes[2] == "complete"


def test_without_a_question_an_episode_has_no_tokens_and_the_rows_own_prompt(speaker):
    made = play(speaker, "fails", rows=1)
    assert [len(ids) for ids in made["response_ids"]] == [0] and made[
        "episode_return"
    ].values.tolist() == [0.0]
    assert [DIGITS.decode(ids) for ids in made["prompt_ids"]] == ["1+2"]


ended: list[str] = []


async def talks(model, row):
    """Never stops by itself."""
    said = [{"role": "user", "content": "1+"}]
    try:
        while True:
            reply = await model.chat(said, max_tokens=1)
            said += [reply.message, {"role": "user", "content": "2+"}]
    except EpisodeOver:
        ended.append(row["name"])
        raise


def talks_in_a_thread(model, row):
    said = [{"role": "user", "content": "1+"}]
    try:
        while True:
            reply = model.chat(said, max_tokens=1)
            said += [reply.message, {"role": "user", "content": "2+"}]
    except EpisodeOver:
        ended.append(row["name"])
        raise


@pytest.mark.parametrize("function", ["talks", "talks_in_a_thread"])
def test_an_agent_hears_of_the_limits_of_its_episode(speaker, function):
    ended.clear()
    turns = play(speaker, function, rows=2)
    assert turns["outcome"].values == ["truncated_turns"] * 2
    tokens = play(speaker, function, rows=2, max_tokens=7)
    assert tokens["outcome"].values == ["truncated_tokens"] * 2
    assert [len(ids) for ids in tokens["response_ids"]] == [7, 7]
    if function == "talks_in_a_thread":
        assert eventually(lambda: sorted(ended) == ["0", "0", "1", "1"])
    assert eventually(lambda: not [one for one in threading.enumerate() if one.name == THREAD])


class Cancelled:
    seen = threading.Event()


async def hangs(model, row):
    await model.chat([{"role": "user", "content": "1+"}], max_tokens=1)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        Cancelled.seen.set()
        raise


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({"timeout_s": 0.3, "on_failure": FailureRule(mask=True)}, "failed_tool"),
        ({"episode_s": 0.5}, "truncated_time"),
    ],
)
def test_an_agent_that_hangs_is_cancelled_at_its_deadline(speaker, settings, outcome):
    Cancelled.seen.clear()
    made = play(speaker, "hangs", rows=2, **settings)
    assert made["outcome"].values == [outcome] * 2
    assert Cancelled.seen.wait(20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, 'needs options.function = "my_agent:solve"'),
        ({"function": f"{__name__}:Cancelled"}, "must be a function of"),
        ({"function": f"{__name__}:chatting"}, "is not called with"),
        ({"function": f"{__name__}:counts", "chat": "free"}, 'set "template" or "plain"'),
        ({"function": f"{__name__}:counts", "tools": "xml"}, "set one of hermes, json, none"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(options, said):
    with pytest.raises(ConfigError, match=said):
        AgentEnvironment(**options)


def test_a_tokenizer_is_refused_or_remarked_upon_when_a_run_is_prepared(caplog):
    agent = AgentEnvironment(function=f"{__name__}:counts")
    with pytest.raises(ConfigError, match="chat template"):
        agent.check(DIGITS)
    agent.check(family("qwen2.5"))
    assert not caplog.text
    agent.check(family("qwen3"))
    assert "differently once" in caplog.text


async def asks_for_digits(model, row):
    """Two turns by the tokenizer's chat template; paid by what the model says."""
    said = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{row['a']} + {row['b']}?"},
    ]
    first = await model.chat(said, max_tokens=6)
    second = await model.chat(
        [*said, first.message, {"role": "user", "content": "Sure?"}], max_tokens=6
    )
    heard.setdefault("run", []).append((said, first, second))
    return float(np.mean(second.ids % 2 == 0))


class Kept(Watched, GRPO):
    pass


def chatting(tmp_path, tokenizer, function: str) -> TinyRun:
    """A run of an agent whose model has the tokenizer's chat template."""
    tokenizer.save(tmp_path)
    end = int(tokenizer.encode("<|im_end|>")[0])
    model = {**MODEL, "vocab_size": 400, "max_position_embeddings": 512}
    tables = {
        "tokenizer": {"path": str(tmp_path)},
        "actor": {
            "model": {"config": model},
            "micro_batch_tokens": 2000,
            "optimizer": {"lr": 1e-30},
        },
        "data": {"max_prompt_tokens": 160},
        "sampling": {"max_tokens": 256, "stop_tokens": [end]},
        "environment": {"name": "agent", "options": {"function": f"{__name__}:{function}"}},
        "reward": {"function": "environment"},
    }
    return TinyRun(Kept(GRPOConfig(prompts_per_step=4, group_size=4)), tables)


def test_a_run_trains_an_agent_on_the_tokens_that_were_sampled(tmp_path):
    heard.clear()
    tokenizer = family("qwen2.5")
    end = int(tokenizer.encode("<|im_end|>")[0])
    with chatting(tmp_path, tokenizer, "asks_for_digits") as run:
        metrics = run.step()
        batch = run.algorithm.batch
        again = run.ctx.actor.logprobs(batch)["old_logprobs"].padded()
        run.ctx.finish()
    assert metrics["actor/complete"] == 1.0 and metrics["actor/turns"] == 2.0
    mask, made = batch["loss_mask"].padded().bool(), batch["rollout_logprobs"].padded()
    torch.testing.assert_close(again[mask], made[mask], atol=1e-4, rtol=0)

    trained = {}
    for prompt, ids, row in zip(
        batch["prompt_ids"], batch["response_ids"], batch["loss_mask"], strict=True
    ):
        trained.setdefault((*prompt.tolist(), -1, *ids.tolist()), []).append(row.tolist())
    for said, first, second in heard["run"]:
        # The reference renders the messages of the agent, and none of the model's.
        begun = tokenizer.apply_chat_template(said).tolist()
        sure = tokenizer.encode(
            "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
        ).tolist()
        closing = [] if int(first.ids[-1]) == end else [end]
        between = closing + sure
        key = (*begun, -1, *first.ids.tolist(), *between, *second.ids.tolist())
        [mask_of, *_] = trained.pop(key)
        assert mask_of == [1] * len(first.ids) + [0] * len(between) + [1] * len(second.ids)
    assert not trained


async def branches_out(model, row):
    """Asks twice, goes on from both, and has a conversation of its own in between."""
    said = [{"role": "user", "content": f"{row['a']} + {row['b']}?"}]
    first, second = await asyncio.gather(*(model.chat(said, max_tokens=6) for _ in range(2)))
    alone = await model.chat([{"role": "user", "content": "Hello"}], max_tokens=6)
    more = {"role": "user", "content": "Sure?"}
    replies = [first, second, alone]
    replies += [
        await model.chat([*said, one.message, more], max_tokens=6) for one in (first, second)
    ]
    heard.setdefault("run", []).append((said, replies))
    return float(first.ids[0] % 2 == 0)


def test_a_run_trains_each_branch_behind_what_stood_before_it(tmp_path):
    heard.clear()
    tokenizer = family("qwen2.5")
    with chatting(tmp_path, tokenizer, "branches_out") as run:
        metrics = run.step()
        batch = run.algorithm.batch
        again = run.ctx.actor.logprobs(batch)["old_logprobs"].padded()
        run.ctx.finish()
    assert metrics["actor/complete"] == 1.0 and metrics["actor/turns"] == 5.0
    assert metrics["actor/branches"] == 4.0 and metrics["actor/mismatch_mean"] < 1e-5
    mask, made = batch["loss_mask"].padded().bool(), batch["rollout_logprobs"].padded()
    torch.testing.assert_close(again[mask], made[mask], atol=1e-4, rtol=0)

    # Two answers to one question are drawn anew.
    assert any(one[0].ids.tolist() != one[1].ids.tolist() for _, one in heard["run"])
    rows = {}
    for prompt, ids, kept, branches in zip(
        *(batch[name] for name in ("prompt_ids", "response_ids", "loss_mask")),
        batch["branches"].values,
        strict=True,
    ):
        rows.setdefault(tuple(ids[kept.bool()].tolist()), []).append((prompt, ids, branches))
    for said, replies in heard["run"]:
        prompt, ids, branches = rows.pop(tuple(np.concatenate([one.ids for one in replies])))[0]
        assert prompt.tolist() == tokenizer.apply_chat_template(said).tolist()
        first, second, alone, *_ = (len(one.ids) for one in replies)
        hello = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}]).tolist()
        start = first + second
        assert ids[start : start + len(hello)].tolist() == hello
        on = start + len(hello) + alone
        last_start = branches[-1][0]
        assert branches == [[first, -1], [start, -2], [on, first - 1], [last_start, start - 1]]
    assert not any(rows.values())


def waits_in_a_sandbox(model, row):
    """Asks from the sandbox, and hangs there in its row 0."""
    with model.sandbox() as box:
        box.write("ask.py", ASK)
        made = box.run(["python3", "ask.py"])
        heard.setdefault(row["name"], []).append((made, box))
        if row["name"] == "0":
            try:
                box.run(["sleep", "600"], seconds=600.0)
            except SandboxError as error:
                heard["ended"] = [str(error), box]
                with pytest.raises(EpisodeOver):
                    model.sandbox()
                raise
    return 1.0


async def awaits_a_sandbox(model, row):
    box = await asyncio.to_thread(model.sandbox)
    made = await asyncio.to_thread(box.run, ["python3", "-c", ASK])
    heard.setdefault(row["name"], []).append((made, box))
    return 1.0  # the sandbox is left to the end of the episode


ASK = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 2}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(asked))["usage"]["completion_tokens"])
"""


def test_a_sandbox_ends_with_its_episode_and_what_runs_in_it_too(speaker):
    isolates("pass")
    heard.clear()
    rule = FailureRule(mask=True)
    made = play(
        speaker, "waits_in_a_sandbox", rows=3, free=True, at_once=3, timeout_s=8, on_failure=rule
    )
    assert made["outcome"].values == ["failed_tool", "complete", "complete"]
    assert all(heard[str(row)][0][0].output in ("1\n", "2\n") for row in range(3))
    eventually(lambda: "ended" in heard)
    said, box = heard["ended"]
    assert said == "the sandbox was closed, or killed, in a command"
    assert ends(box._jail.pid)


def test_an_async_agent_may_leave_its_sandbox_to_the_end(speaker):
    isolates("pass")
    heard.clear()
    made = play(speaker, "awaits_a_sandbox", rows=2)
    assert made["outcome"].values == ["complete"] * 2
    for row in range(2):
        [(outcome, box)] = heard[str(row)]
        assert outcome.output in ("1\n", "2\n")  # the model may end its turn
        with pytest.raises(SandboxError, match="is closed"):
            box.run(["true"])
