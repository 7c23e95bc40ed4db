"""Clients of OpenAI and Anthropic, as they are, and the tokens that become of what they send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import anthropic
import openai
import pytest
from helpers.conversations import CALL, END, TOKENIZER, ScriptedModel

from hybridflow.kit.chat import conversation, endpoint as module
from hybridflow.kit.chat.conversation import EpisodeOver
from hybridflow.kit.chat.endpoint import endpoint

SYSTEM, QUESTION, RESULT, ANSWER = "Add.", "1+2?", "three", "<think>\nEasy.\n</think>\n\nIt is 3"
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
OPENAI_TOOL = {"type": "function", "function": FUNCTION}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
THANKS = "Thanks. And 2+2?"


@pytest.fixture
def reach():
    """From a scripted model to the keyword arguments of its clients."""
    keys = []

    def made(model: ScriptedModel) -> dict:
        keys.append(endpoint().open(model.conversation))
        return {"base_url": f"{endpoint().url}/v1", "api_key": keys[-1], "max_retries": 0}

    yield made
    for key in keys:
        endpoint().close(key)


def expected(tools: bool = True) -> list[int]:
    """The tokens of the conversation that all the agents below have, as transformers renders it."""
    call = {"id": "", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": RESULT},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": THANKS},
        {"role": "assistant", "content": "4"},
    ]
    ids = TOKENIZER.apply_chat_template(messages, [OPENAI_TOOL], complete=True).tolist()
    return ids[: len(ids) - ids[::-1].index(END)]


def talks_by_chat_completions(where, stream: bool):
    client = openai.OpenAI(**where)

    def ask(messages):
        made = {"model": "gpt-any", "messages": messages, "tools": [OPENAI_TOOL]}
        if not stream:
            return client.chat.completions.create(**made).choices[0].message
        with client.chat.completions.stream(
            **made, stream_options={"include_usage": True}
        ) as events:
            done = events.get_final_completion()
        assert done.usage.completion_tokens > 0
        return done.choices[0].message

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    first = ask(messages)
    (call,) = first.tool_calls
    assert (first.content, call.function.name, call.function.arguments) == (None, "add", '{"x": 1}')
    messages += [
        {"role": "assistant", "content": first.content, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    second = ask(messages)
    assert second.content == "It is 3" and second.reasoning_content == "Easy."
    messages += [
        second.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": THANKS}]},
    ]
    return ask(messages).content


def talks_by_responses(where, stream: bool, names_earlier: bool = True):
    client = openai.OpenAI(**where)
    tool = {"type": "function", **FUNCTION}

    def ask(given, **more):
        made = {"model": "gpt-any", "input": given, "instructions": SYSTEM, "tools": [tool], **more}
        if not stream:
            return client.responses.create(**made)
        with client.responses.stream(**made) as events:
            return events.get_final_response()

    items = [{"role": "user", "content": QUESTION}]
    first = ask(items)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"x": 1})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    if names_earlier:
        second = ask([result], previous_response_id=first.id)
        third = ask(THANKS, previous_response_id=second.id)
    else:
        items += [one.model_dump(exclude_none=True) for one in first.output] + [result]
        second = ask(items)
        items += [one.model_dump(exclude_none=True) for one in second.output]
        third = ask([*items, {"role": "user", "content": [{"type": "input_text", "text": THANKS}]}])
    assert second.output_text == "It is 3" and second.status == "completed"
    assert second.output[0].content[0].text == "Easy."
    return third.output_text


def talks_by_anthropic_messages(where, stream: bool):
    client = anthropic.Anthropic(**{**where, "base_url": where["base_url"].removesuffix("/v1")})

    def ask(messages):
        made = {"model": "claude-any", "max_tokens": 4096, "messages": messages, "system": SYSTEM}
        made |= {"tools": [ANTHROPIC_TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        if not stream:
            return client.messages.create(**made)
        with client.messages.stream(**made) as events:
            return events.get_final_message()

    messages = [{"role": "user", "content": QUESTION}]
    first = ask(messages)
    assert first.stop_reason == "tool_use"
    (use,) = first.content
    assert (use.type, use.name, use.input) == ("tool_use", "add", {"x": 1})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = ask(messages)
    thinking, text = second.content
    assert (thinking.thinking, text.text, second.stop_reason) == ("Easy.", "It is 3", "end_turn")
    messages += [
        {"role": "assistant", "content": second.content},
        {"role": "user", "content": [{"type": "text", "text": THANKS}]},
    ]
    return ask(messages).content[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "talks", [talks_by_chat_completions, talks_by_responses, talks_by_anthropic_messages]
)
def test_what_clients_send_becomes_the_tokens_of_the_models_template(reach, talks, stream):
    model = ScriptedModel(CALL, ANSWER, "4")
    assert talks(reach(model), stream) == "4"
    assert [*model.contexts[-1], *model.turns[-1]] == expected() and model.asked[-1].after is None


def test_a_client_of_responses_may_send_all_items_again(reach):
    model = ScriptedModel(CALL, ANSWER, "4")
    assert talks_by_responses(reach(model), False, names_earlier=False) == "4"
    assert [*model.contexts[-1], *model.turns[-1]] == expected() and model.asked[-1].after is None


USER = {"role": "user", "content": QUESTION}


def test_stops_limits_and_logprobs_of_each_format(reach):
    model = ScriptedModel("So 3. Bye", "So 3. Bye")
    client = openai.OpenAI(**reach(model))
    made = client.chat.completions.create(
        model="m", messages=[USER], stop=". B", max_completion_tokens=9, logprobs=True
    )
    choice = made.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("So 3", "stop")
    assert model.asked[0].max_tokens == 9
    told = choice.logprobs.content
    assert "".join(one.token for one in told).startswith("So 3. B") and told[0].logprob == -0.5
    assert made.usage.completion_tokens == len(told)
    assert made.usage.prompt_tokens == len(model.asked[0].ids)

    model = ScriptedModel("So 3. Bye")
    where = reach(model)
    client = anthropic.Anthropic(api_key=where["api_key"], base_url=endpoint().url)
    made = client.messages.create(model="m", messages=[USER], stop_sequences=["Bye"], max_tokens=9)
    assert (made.content[0].text, made.stop_reason, made.stop_sequence) == (
        "So 3. ",
        "stop_sequence",
        "Bye",
    )

    model = ScriptedModel()
    client = openai.OpenAI(**reach(model))
    threading.Timer(0.1, lambda: model.answers("So", cut=True)).start()
    made = client.responses.create(model="m", input=QUESTION, max_output_tokens=2)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_what_only_the_runs_settings_decide_is_said_once(reach, caplog, monkeypatch):
    monkeypatch.setattr(endpoint(), "_said", set())
    model = ScriptedModel("3", "4")
    client = openai.OpenAI(**reach(model))
    more = {"temperature": 0.2, "tool_choice": "auto", "user": "me", "seed": None}
    first = client.chat.completions.create(model="m", messages=[USER], **more).choices[0].message
    again = [USER, first.model_dump(), {"role": "user", "content": "2+2?"}]
    client.chat.completions.create(model="m", messages=again, temperature=0.3)
    assert [record.getMessage() for record in caplog.records if "endpoint" in record.name] == [
        "an agent asks for temperature = 0.2, which is not used: tokens are sampled by the run's own "
        "settings ([sampling])"
    ]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {"messages": [USER], "n": 0}, "n is 0; ask for 1 at least"),
        (
            "chat/completions",
            {"messages": [USER], "top_logprobs": 2},
            "which this endpoint does not",
        ),
        ("chat/completions", {"messages": []}, "with no message"),
        ("chat/completions", {"messages": "hi"}, "messages is 'hi'; send a list of objects"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "a message is a dict with role"),
        ("chat/completions", {"messages": [USER], "max_tokens": 0}, "ask for 1 at least"),
        ("chat/completions", {"messages": [USER], "stop": [1]}, "send texts that are not empty"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of type 'image_url'; only text",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "a call is {id, type, function",
        ),
        ("chat/completions", [], "send a JSON object"),
        ("chat/completions", "{", "the request cannot be read"),
        (
            "responses",
            {"input": "x", "previous_response_id": "resp_1"},
            "no answer of this episode",
        ),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "only functions of the"),
        ("responses", {"input": [{"type": "item_reference"}]}, "an item of type 'item_reference'"),
        (
            "messages",
            {"messages": [USER], "tools": [{"type": "bash_1"}]},
            "only an agent's own tools",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "read",
        ),
    ],
)
def test_a_call_that_cannot_be_answered_says_why_and_the_episode_goes_on(reach, path, body, said):
    model = ScriptedModel("3")
    where = reach(model)
    status, told = post(where, path, body if isinstance(body, str) else json.dumps(body))
    assert status == 400 and said in told["error"]["message"]
    made = openai.OpenAI(**where).chat.completions.create(model="m", messages=[USER])
    assert made.choices[0].message.content == "3" and len(model.asked) == 1


def post(where, path: str, body: str, **headers) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {where['api_key']}", **headers}
    request = urllib.request.Request(f"{where['base_url']}/{path}", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_key_opens_one_episode_until_its_end(reach):
    mine, other = ScriptedModel("3"), ScriptedModel("4")
    first, second = reach(mine), reach(other)
    ask = {"model": "m", "messages": [USER]}
    assert openai.OpenAI(**second).chat.completions.create(**ask).choices[0].message.content == "4"
    assert not mine.asked
    endpoint().close(first["api_key"])
    for key in (first["api_key"], "sk-guessed", ""):
        status, told = post({**first, "api_key": key}, "chat/completions", json.dumps(ask))
        assert status == 401 and "an episode's key ends with it" in told["error"]["message"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(**first).models.list()
    with pytest.raises(anthropic.AuthenticationError):
        client = anthropic.Anthropic(api_key="sk-guessed", base_url=endpoint().url, max_retries=0)
        client.messages.create(model="m", messages=[USER], max_tokens=9)
    assert not mine.asked
    assert [one.id for one in openai.OpenAI(**second).models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="there are POST /v1/chat/completions"):
        openai.OpenAI(**second).embeddings.create(model="m", input="x")


def test_an_episode_that_ends_while_a_client_waits_tells_it(reach):
    model = ScriptedModel()
    client = openai.OpenAI(**reach(model))
    over = EpisodeOver("the episode has ended")
    threading.Timer(0.2, lambda: model.futures[-1].set_exception(over)).start()
    with pytest.raises(openai.APIStatusError, match="the episode has ended") as raised:
        client.chat.completions.create(model="m", messages=[USER])
    assert raised.value.status_code == 410


def test_a_client_that_asks_again_after_its_own_limit_gets_the_answer_that_was_made(reach):
    model = ScriptedModel()
    client = openai.OpenAI(**{**reach(model), "max_retries": 20}, timeout=0.3)
    ask = {"model": "m", "messages": [USER]}
    threading.Timer(1.5, lambda: model.answers("3")).start()
    made = client.chat.completions.create(**ask)
    assert made.choices[0].message.content == "3" and len(model.asked) == 1
    # Asked once more it is another question.
    model.script = ["4"]
    assert client.chat.completions.create(**ask).choices[0].message.content == "4"
    assert [one.after for one in model.asked] == [None, -1]


def test_a_client_that_left_and_says_nothing_of_it_gets_the_answer_too(reach):
    model = ScriptedModel()
    where = reach(model)
    client = openai.OpenAI(**where, timeout=0.3)
    ask = {"model": "m", "messages": [USER]}
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**ask)
    calls = endpoint()._doors[where["api_key"]].calls
    end = time.monotonic() + 20
    while not next(iter(calls.values())).left and time.monotonic() < end:
        time.sleep(0.01)
    threading.Timer(0.3, lambda: model.answers("3")).start()
    made = client.with_options(timeout=20).chat.completions.create(**ask)
    assert made.choices[0].message.content == "3" and len(model.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_one_call_are_branches(reach, stream):
    model = ScriptedModel("1", "2", CALL)
    client = openai.OpenAI(**reach(model))
    ask = {"model": "m", "messages": [USER], "n": 3, "tools": [OPENAI_TOOL]}
    if stream:
        with client.chat.completions.stream(**ask) as events:
            made = events.get_final_completion()
    else:
        made = client.chat.completions.create(**ask)
    assert [choice.message.content for choice in made.choices] == ["1", "2", None]
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert made.choices[2].message.tool_calls[0].function.name == "add"
    prompt = TOKENIZER.apply_chat_template([USER], [OPENAI_TOOL]).tolist()
    assert model.contexts == [prompt] * 3


async def asks_at_the_same_time(where):
    client = openai.AsyncOpenAI(**where)
    made = await asyncio.gather(
        *(client.chat.completions.create(model="m", messages=[USER]) for _ in range(4))
    )
    return [one.choices[0].message.content for one in made]


def test_calls_at_the_same_time_get_an_answer_each(reach):
    model = ScriptedModel()
    where = reach(model)

    def answers():
        for number in range(4):
            while len(model.asked) <= number:
                time.sleep(0.01)
            time.sleep(0.05)
            model.answers(str(number))

    threading.Thread(target=answers, daemon=True).start()
    assert sorted(asyncio.run(asks_at_the_same_time(where))) == ["0", "1", "2", "3"]
    assert model.contexts == [TOKENIZER.apply_chat_template([USER]).tolist()] * 4


def test_an_agent_that_asks_faster_than_the_model_answers_is_told(reach, monkeypatch):
    monkeypatch.setattr(conversation, "MOST_WAITING", 2)
    model = ScriptedModel()
    where = reach(model)
    for _ in range(2):
        model.chat(USER)
    with pytest.raises(openai.RateLimitError, match="2 calls of this episode wait"):
        openai.OpenAI(**where).chat.completions.create(model="m", messages=[USER])


def test_a_question_that_was_refused_is_asked_when_it_is_sent_again(reach, monkeypatch):
    model = ScriptedModel("3")
    where = reach(model)
    ask = {"model": "m", "messages": [USER]}
    client = openai.OpenAI(**where)
    assert client.chat.completions.create(**ask).choices[0].message.content == "3"
    monkeypatch.setattr(conversation, "MOST_WAITING", 1)
    waits = model.chat(USER)
    body = json.dumps({"messages": [USER]})
    again = {"x-stainless-retry-count": "1"}
    assert post(where, "chat/completions", body)[0] == 429
    assert post(where, "chat/completions", body, **again)[0] == 429
    model.answers("4")
    assert waits.result(0).content == "4"
    model.script = ["5"]
    _, told = post(where, "chat/completions", body, **again)
    assert told["choices"][0]["message"]["content"] == "5"


def test_a_request_that_is_too_large_is_refused(reach, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 2**20)
    model = ScriptedModel("3")
    ask = {"messages": [{"role": "user", "content": "x" * 2**20}]}
    status, told = post(reach(model), "chat/completions", json.dumps(ask))
    assert status == 413 and "at most 1 MiB" in told["error"]["message"] and not model.asked


def test_without_its_packages_an_endpoint_says_what_to_install():
    code = (
        "import sys\nsys.modules['uvicorn'] = None\n"
        "from hybridflow.kit.chat.endpoint import endpoint\n"
        "try:\n    endpoint()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == (
        "HybridFlowError an endpoint for agents needs uvicorn; pip install 'hybridflow[agents]'"
    )


def test_a_further_socket_has_its_own_connections_and_ends_with_them(reach, monkeypatch):
    """As many as it may have at a time; the next one waits for a place, and others do not wait for it."""
    monkeypatch.setattr(module, "CONNECTIONS", 2)
    model = ScriptedModel("4")
    key = reach(model)["api_key"]
    body = json.dumps({"messages": [{"role": "user", "content": "2+2?"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    door = socket.create_server(("127.0.0.1", 0))
    address = door.getsockname()
    end = endpoint().serve(door)
    held = [socket.create_connection(address, 10) for _ in range(2)]
    time.sleep(0.2)
    with socket.create_connection(address, 10) as third:
        third.sendall(request)
        third.settimeout(0.5)
        with pytest.raises(TimeoutError):
            third.recv(1)
        # The main socket has its own.
        with socket.create_connection(("127.0.0.1", endpoint().port), 10) as main:
            main.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"401" in main.recv(100)
        held.pop().close()
        third.settimeout(10)
        assert third.recv(15) == b"HTTP/1.1 200 OK"
        end()
        third.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while third.recv(10_000):
                pass
    held[0].settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert held[0].recv(1) == b""
    held[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 10)


def test_a_further_socket_goes_on_after_a_connection_that_could_not_be_accepted(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    failures = [OSError(24, "Too many open files")] * 3
    loop = endpoint()._loop
    accept = loop.sock_accept

    async def accepts(listener):
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", accepts)
    door = socket.create_server(("127.0.0.1", 0))
    end = endpoint().serve(door)
    with socket.create_connection(door.getsockname(), 10) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"401" in client.recv(100)
    assert not failures
    end()
