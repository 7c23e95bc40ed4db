"""What is put between two turns of the model equals what a template writes there for the whole conversation."""

from __future__ import annotations

import random

import pytest
from helpers.sources import char
from helpers.templates import FAMILIES, QWEN25, WITH_TOOLS, chat_tokenizer, family

from hybridflow.core.errors import ConfigError, DataError
from hybridflow.kit.chat.rendering import ChatRenderer, PlainRenderer, content, normalised

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    },
}


MARK = "@@"
"""Ends the content of each turn, and each argument."""


def drawn(draws: random.Random, tools: bool, system: bool) -> list[dict]:
    """A conversation of texts without spaces at their ends, which some templates remove."""

    def text() -> str:
        letters = "".join(draws.choice("ab1 <>\n{é☃") for _ in range(draws.randrange(8)))
        return letters + draws.choice("xyz?")

    said = [{"role": "system", "content": text()}] if system and draws.random() < 0.5 else []
    said.append({"role": "user", "content": text()})
    for _ in range(draws.randrange(1, 4)):
        turn = {"role": "assistant", "content": text() + MARK}
        said.append(turn)
        if tools and draws.random() < 0.5:
            ids = [f"call{draws.randrange(10**9):09d}" for _ in range(draws.choice((1, 2)))]
            function = {"name": "add", "arguments": {"x": text() + MARK}}
            turn["tool_calls"] = [
                {"id": one, "type": "function", "function": function} for one in ids
            ]
            said += [
                {"role": "tool", "tool_call_id": one, "name": "add", "content": text()}
                for one in ids
            ]
        else:
            said.append({"role": "user", "content": text()})
    return said


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_of_texts_has_the_tokens_of_its_template(name):
    """The reference renders everything as a text; what stands after the model's last turn must be equal, to the character."""
    tokenizer, end = family(name), FAMILIES[name][2]
    renderer = ChatRenderer(tokenizer)
    draws = random.Random(name)
    [end_id] = tokenizer.encode(end).tolist()
    for _ in range(60):
        tools = [TOOL] if name in WITH_TOOLS and draws.random() < 0.5 else []
        said = drawn(draws, bool(tools), name != "gemma2")
        last = max(at for at, message in enumerate(said) if message["role"] == "assistant")
        whole = tokenizer.hf.apply_chat_template(
            said, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        expected = whole.rpartition(MARK)[2].partition(end)[2]
        between = renderer.follow(end_id, said[last + 1 :], tools)
        assert expected and tokenizer.decode(between, skip_special=False) == expected
        # A turn that its limit has cut is closed first.
        assert renderer.follow(None, said[last + 1 :], tools) == [end_id, *between]


def test_each_family_passes_and_those_that_change_earlier_turns_are_told():
    told = {
        name
        for name in FAMILIES
        if ChatRenderer(family(name)).check('set environment.options.chat = "plain"')
    }
    assert told == {"qwen3", "mistral", "phi4"}
    assert "once" in ChatRenderer(family("qwen3")).check('set environment.options.chat = "plain"')


COUNTS = QWEN25.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}",
    "<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}",
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            COUNTS,
            "not append-only: after .* differently than elsewhere; set environment.options.chat",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out what the model has said",
        ),
        ("{{ raise_exception('no chats') }}", "no chats.*set environment.options.chat"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(template, said):
    with pytest.raises(ConfigError, match=said):
        ChatRenderer(chat_tokenizer(template)).check('set environment.options.chat = "plain"')


def test_a_tokenizer_without_a_template_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r'environment.options.chat = "plain"'):
        ChatRenderer(char()).check('set environment.options.chat = "plain"')


def test_options_reach_the_template():
    template = "{{ mood }}{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    tokenizer = chat_tokenizer(template)
    begun = ChatRenderer(tokenizer, {"mood": "gay"}).begin([{"role": "user", "content": "Hi"}], ())
    assert tokenizer.decode(begun) == "gayHi"


def test_plain_conversations_are_contents_one_after_the_other():
    renderer = PlainRenderer(char())
    assert renderer.check('set environment.options.chat = "plain"') == ""
    said = [{"role": "system", "content": "1"}, {"role": "user", "content": "2+"}]
    assert renderer.begin(said, ()) == char().encode("12+").tolist()
    assert (
        renderer.follow(2, [{"role": "tool", "content": "3="}], ()) == char().encode("3=").tolist()
    )
    with pytest.raises(DataError, match="has no tools"):
        renderer.begin(said, [TOOL])


def test_messages_are_what_templates_read():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert content({"content": parts}) == "ab" and content({"content": None}) == ""
    with pytest.raises(DataError, match="a part of type 'image_url'"):
        content({"content": [{"type": "image_url"}]})
    call = {"id": "c", "function": {"name": "add", "arguments": '{"x": 1}'}, "index": 0}
    made = normalised({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    assert made == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
        ],
    }
    assert normalised({"role": "developer", "content": "x"})["role"] == "system"
    wrong = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}
    assert normalised(wrong)["tool_calls"][0]["function"]["arguments"] == "{"
    with pytest.raises(DataError, match="a message is a dict with role and content"):
        normalised("Hi")
