"""The loop of calls and answers, by a model that follows a script, and the sandbox's Python."""

from __future__ import annotations

import json

import pytest
from helpers.conversations import ScriptedModel
from helpers.programs import run as isolates

from hybridflow.backends.agents.environment import BlockingModel
from hybridflow.backends.agents.react import RETURNED, Tool, ToolError, python, react, solve
from hybridflow.kit.sandbox.session import Sandbox


def calls(name: str, **arguments) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def python_calls(code: str) -> str:
    return calls("python", code=code)


def add(a, b) -> str:
    if not isinstance(a, int):
        raise ToolError("a is a number")
    return str(a + b)


ADD = Tool(
    "add",
    "Adds.",
    {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
    add,
)


def test_a_model_reads_what_its_tools_return_until_it_answers_without_a_call():
    scripted = ScriptedModel(
        f"I add.{calls('add', a=1, b=2)}{calls('add', a=3, b=4)}",
        calls("add", a=5, b=6),
        "It is 11.",
    )
    said = [{"role": "user", "content": "5 + 6?"}]
    reply = react(BlockingModel(scripted.conversation), said, [ADD])
    assert reply.content == "It is 11."
    assert [one["content"] for one in said if one["role"] == "tool"] == ["3", "7", "11"]
    assert [one["role"] for one in said] == [
        "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    first, second, third = scripted.texts()
    assert '"name": "add"' in first and "5 + 6?" in first
    assert second.count("<tool_response>") == 2 and "\n3\n" in second and "\n7\n" in second
    assert "\n11\n" in third


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (calls("sub", a=1), "error: there is no tool 'sub'; there are add"),
        (calls("add", a=1), "error: add takes a, b; got a"),
        (calls("add"), "error: add takes a, b; got nothing"),
        (calls("add", a=1, b=2, c=3), "error: add takes a, b; got a, b, c"),
        (calls("add", a="1", b=2), "error: a is a number"),
    ],
)
def test_a_call_that_cannot_be_answered_is_an_error_that_the_model_reads(call, said):
    messages = [{"role": "user", "content": "?"}]
    react(BlockingModel(ScriptedModel(call, "No.").conversation), messages, [ADD])
    assert messages[2]["content"] == said


def test_a_tool_that_fails_otherwise_ends_the_episode():
    scripted = ScriptedModel(calls("add", a=1, b="2"))
    with pytest.raises(TypeError):
        react(BlockingModel(scripted.conversation), [{"role": "user", "content": "?"}], [ADD])


def test_programs_of_the_model_run_in_a_sandbox_and_share_its_files():
    isolates("pass")
    scripted = ScriptedModel(
        python_calls("open('a', 'w').write('17')\nprint('saved')"),
        python_calls("print(int(open('a').read()) * 3)\n1 / 0"),
        python_calls("import sys\nsys.exit(3)"),
        python_calls("import os\nprint(os.path.exists('/work'), os.getcwd())"),
        calls("python", code=7),
        "It is 51.",
    )
    texts = []
    answered = scripted.conversation.chat

    def chat(messages, *more):
        texts.append(messages[-1]["content"])
        return answered(messages, *more)

    scripted.conversation.chat = chat
    solve(BlockingModel(scripted.conversation), {"prompt": "17 * 3?"})
    assert texts[0] == "17 * 3?" and texts[1] == "saved\n"
    assert texts[2].startswith("51\nTraceback") and "ZeroDivisionError" in texts[2]
    assert texts[3] == "\nerror: exit status 3" and texts[4] == "False /tmp\n"
    assert texts[5] == "error: code is a text of Python; got 7"


def test_what_a_program_prints_is_cut_and_its_limits_are_told(monkeypatch):
    isolates("pass")
    messages = [{"role": "user", "content": "?"}]
    with Sandbox() as box:
        monkeypatch.setattr(box, "limits", box.limits.__class__(seconds=1.0))
        model = ScriptedModel(
            python_calls("print('a' * 3000 + 'b')"),
            python_calls("while True: pass"),
            python_calls("while True: print('x' * 1000)"),
            "Done.",
        )
        react(BlockingModel(model.conversation), messages, [python(box)])
    cut, late, flood = (one["content"] for one in messages if one["role"] == "tool")
    assert cut.startswith("aaa") and cut.endswith("aab\n") and "\n...\n" in cut
    assert len(cut) == RETURNED + 5
    assert late.endswith("error: it took too long") or "status 137" in late or "status 152" in late
    assert flood.endswith("error: it printed too much")
