"""Lists of messages in the fields of a row."""

from __future__ import annotations

import pytest

from hybridflow.core.data.chats import is_chat, messages_of, split_prompt, template_options
from hybridflow.core.errors import DataError

ASK = {"role": "user", "content": "1+1"}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    "value, expected",
    [
        ([ASK], True),
        ((ASK, GOOD), True),
        ([], False),
        ("user", False),
        ([{"content": "1"}], False),
        (["user"], False),
        (None, False),
    ],
)
def test_a_chat_is_a_list_of_messages_with_roles(value, expected):
    assert is_chat(value) is expected


def test_keys_without_a_value_are_no_part_of_a_message():
    assert messages_of([{**ASK, "tool_calls": None}]) == [ASK]


def test_a_prompt_is_what_both_chats_begin_with():
    assert split_prompt([[ASK, GOOD], [ASK, BAD]]) == [ASK]
    assert split_prompt([[ASK, GOOD, ASK, GOOD], [ASK, GOOD, ASK, BAD]]) == [ASK, GOOD, ASK]
    assert split_prompt([[ASK, GOOD], [ASK, GOOD]]) == [ASK]  # equal ones
    assert split_prompt([[ASK, GOOD]]) == [ASK]
    assert split_prompt([[GOOD], [BAD]]) == []


def test_a_row_s_options_lie_over_those_of_the_settings():
    row = {"tools": [{"name": "add"}], "chat_template_kwargs": {"a": 1, "b": None}}
    assert template_options(row, {"a": 0, "b": 2}, 0) == ([{"name": "add"}], {"a": 1, "b": 2})
    assert template_options({}, {}, 0) == ([], {})
    with pytest.raises(DataError, match="row 3: the field 'tools' must be a list"):
        template_options({"tools": "not json"}, {}, 3)
