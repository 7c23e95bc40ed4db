"""What a turn says, thinks and calls."""

from __future__ import annotations

import json

import pytest

from hybridflow.kit.chat.parsing import message_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def calls(message):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


def test_thinking_stands_apart_whether_the_prompt_opened_it_or_the_turn():
    for text in ("<think>\nhm\n</think>\n\nYes", "hm\n</think>\n\nYes"):
        assert message_of(text, "none", 0) == {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "Yes",
        }
    assert message_of("<think>\nhm", "none", 0) == {"role": "assistant", "content": "<think>\nhm"}


@pytest.mark.parametrize(
    ("form", "text", "content", "found"),
    [
        ("hermes", f"I add.\n{CALL}", "I add.", [("add", {"x": 1})]),
        ("hermes", f"{CALL}\n{CALL}", "", [("add", {"x": 1})] * 2),
        ("hermes", "<tool_call>{'name': 1}</tool_call>", "<tool_call>{'name': 1}</tool_call>", []),
        ("hermes", f"{CALL}<tool_call>[1]</tool_call>", f"{CALL}<tool_call>[1]</tool_call>", []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            [],
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ("json", '{"name": "add", "parameters": {"x": 2}}', "", [("add", {"x": 2})]),
        ("json", "No call.", "No call.", []),
        ("none", CALL, CALL, []),
    ],
)
def test_calls_of_tools_are_read_or_stay_text(form, text, content, found):
    made = message_of(text, form, 3)
    assert (made["content"], calls(made)) == (content, found)
    ids = [call["id"] for call in made.get("tool_calls", ())]
    # Mistral's template takes ids of at least nine letters and digits.
    assert len(set(ids)) == len(ids) and all(len(one) >= 9 and one.isalnum() for one in ids)
    assert set(ids).isdisjoint(
        call["id"] for call in message_of(text, form, 4).get("tool_calls", ())
    )


def test_a_turn_without_end_is_read_in_a_time_that_grows_with_its_length():
    """A backtracking pattern would take hours for these."""
    for text in (
        "<tool_call>" + "\n" * 100_000,
        "<tool_call>" * 20_000,
        CALL * 5_000 + "<tool_call>",
    ):
        message = message_of(text, "hermes", 0)
        assert message["content"] == ("<tool_call>" if CALL in text else text)


@pytest.mark.parametrize("form", ["hermes", "json"])
def test_brackets_within_brackets_are_no_call(form):
    text = "[" * 100_000 if form == "json" else f"<tool_call>{'[' * 100_000}</tool_call>"
    assert message_of(text, form, 0) == {"role": "assistant", "content": text}
