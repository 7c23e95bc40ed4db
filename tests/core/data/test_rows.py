"""Rows as texts: templates, patterns and chats, and errors that name the row."""

from __future__ import annotations

import pytest
from helpers.sources import ListSource, sums

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.data.rows import Rows, data_problems
from hybridflow.core.errors import ConfigError, DataError

QUESTION = {"role": "user", "content": "1+1"}
REPLY = {"role": "assistant", "content": "2"}


def rows_of(rows, **config) -> Rows:
    config = DataConfig(**config)
    return Rows(ListSource(config, rows), config)


def test_templates_are_filled_with_the_fields_of_the_row():
    rows = rows_of(
        sums(3), prompt="{a:02d}+{b}", response="{answer}!", rejected="{a}", answer="0{answer}"
    )
    row = rows[2]
    assert len(rows) == 3
    assert (row.prompt, row.response, row.rejected) == ("02+7", "9!", "2")
    assert row.messages is None
    assert row.meta == {"a": 2, "b": 7, "text": "2+7=", "answer": "09"}
    assert list(row.texts()) == ["02+7", "9!", "2", "09"]
    with pytest.raises(IndexError):
        rows[3]


def test_a_row_is_read_from_the_source_when_it_is_asked_for():
    rows = rows_of(sums(3), prompt="{text}")
    assert rows.source.reads == 0
    assert rows[1].prompt == "1+7="
    assert rows.source.reads == 1


def test_the_row_says_of_both_responses_whether_they_are_unsafe():
    given = [{"prompt": "p", "good": "g", "bad": "b", "u": False, "v": True}]
    settings = dict(response="{good}", rejected="{bad}", unsafe=("u", "v"))
    assert rows_of(given, **settings)[0].unsafe == (False, True)
    with pytest.raises(DataError, match=r"row 0.*'v' of data\.unsafe"):
        rows_of([{**given[0], "v": 1}], **settings)[0]
    with pytest.raises(DataError, match=r"row 0 has no field 'w', which data\.unsafe names"):
        rows_of(given, **{**settings, "unsafe": ("u", "w")})[0]


def test_a_template_that_names_a_missing_field_lists_those_that_there_are():
    with pytest.raises(
        DataError,
        match=r"row 0 .*data.prompt = '\{txt\}' .*did you mean 'text'",
    ):
        rows_of(sums(2), prompt="{txt}")[0]
    rows = rows_of([*sums(3), {"other": 1}], prompt="{text}")
    with pytest.raises(DataError, match=r"row 3 has no field 'text'.*its fields: other"):
        rows[3]


def test_a_field_that_is_null_or_does_not_fit_the_template_is_an_error_and_not_the_text_none():
    with pytest.raises(DataError, match=r"row 0: data.prompt = '\{a\}'.*'a' is null"):
        rows_of([{"a": None}], prompt="{a}")[0]
    with pytest.raises(DataError, match=r"row 0: data.response"):
        rows_of([{"a": "1"}], prompt="{a}", response="{a:02d}")[0]
    with pytest.raises(DataError, match=r"row 0: data.answer"):
        rows_of([{"prompt": "p", "a": {"b": 1}}], answer="{a[c]}")[0]


def test_every_match_of_a_pattern_is_a_row_over_the_fields_of_its_own():
    given = [
        {"id": 1, "text": "<<1+2=3>> and <<3*4=12>>"},
        {"id": 2, "text": None},
        {"id": 3, "text": "<<5-1=4>>"},
    ]
    rows = rows_of(
        given,
        pattern="<<(?P<left>[^<>=]+)=(?P<right>[^<>]+)>>",
        pattern_field="text",
        prompt="{left}=",
        answer="{right}",
    )
    assert [row.prompt for row in rows] == ["1+2=", "3*4=", "5-1="]
    assert [row.meta["answer"] for row in rows] == ["3", "12", "4"]
    assert [row.meta["id"] for row in rows] == [1, 1, 3]


def test_a_pattern_searches_numbers_too():
    rows = rows_of(
        [{"n": 0}, {"n": 12}], pattern="(?P<digit>[0-9])", pattern_field="n", prompt="{digit}"
    )
    assert [row.prompt for row in rows] == ["0", "1", "2"]


def test_a_pattern_without_a_match_or_field_says_where_it_looked():
    with pytest.raises(DataError, match="'text' of any of the 2 rows"):
        rows_of(sums(2), pattern="(?P<x>z)", pattern_field="text")
    with pytest.raises(DataError, match=r"data.pattern_field .*'text'"):
        rows_of(sums(2), pattern="(?P<x>z)", pattern_field="tex")
    assert len(rows_of([], pattern="(?P<x>z)", pattern_field="text")) == 0


def test_the_last_message_is_the_response_where_it_is_the_assistants():
    rows = rows_of([{"chat": [QUESTION, REPLY]}, {"chat": [QUESTION]}], messages="chat")
    assert (rows[0].messages, rows[0].response, rows[0].prompt) == ([QUESTION], [REPLY], None)
    assert (rows[1].messages, rows[1].response) == ([QUESTION], None)
    assert list(rows.texts()) == ["1+1", "2", "1+1"]


@pytest.mark.parametrize(
    "row, words",
    [
        ({"chat": "hello"}, "must be a list of messages.*'hello'"),
        ({"chat": []}, "must be a list of messages"),
        ({"chat": [{"content": "1"}]}, "must be a list of messages"),
        ({"chat": [REPLY]}, "no message before the assistant's"),
        ({"char": []}, r"no field 'chat'.*did you mean 'char'"),
    ],
)
def test_a_chat_that_is_none_is_named(row, words):
    with pytest.raises(DataError, match=words):
        rows_of([row], messages="chat")[0]


@pytest.mark.parametrize(
    "config, words",
    [
        (dict(prompt="{a"), "not a format template"),
        (dict(prompt="{}"), "unnamed field"),
        (dict(prompt="{a:{0}}"), "unnamed field"),
        (dict(rejected="{bad}"), "give the better one too"),
        (dict(response="{good}", rejected="{}"), r"data\.rejected = '\{\}' has an unnamed field"),
        (dict(unsafe=("u", "v")), "data.unsafe names two fields"),
        (dict(messages="chat", prompt="{q}"), "both given"),
        (dict(messages="chat", bos=True), "two bos tokens"),
        (dict(pattern="(?P<a>.)"), "go together"),
        (dict(pattern="(", pattern_field="t"), "not a regular expression"),
        (dict(pattern="a", pattern_field="t"), "no named group"),
    ],
)
def test_settings_that_cannot_work_are_reported(config, words):
    with pytest.raises(ConfigError, match=words):
        rows_of(sums(1), **config)


@pytest.mark.parametrize(
    ("row", "config", "words"),
    [
        ("1+1=", {}, "row 0 of data source 'jsonl' is a str"),
        ({"chat": [QUESTION, REPLY]}, dict(messages="chat", response="3"), "remove data.response"),
        (
            {"prompt": "1+1", "completion": [REPLY]},
            dict(response="{completion}"),
            "row 0: .* is a chat and data.prompt is a text",
        ),
        ({"prompt": [QUESTION]}, dict(bos=True), "two bos tokens"),
    ],
)
def test_a_row_that_the_settings_do_not_fit_is_told(row, config, words):
    with pytest.raises(DataError, match=words):
        rows_of([row], **config)[0]


def test_all_problems_of_the_settings_are_reported_at_once():
    assert len(data_problems(DataConfig(prompt="{", unsafe=("a",), messages="m"))) == 3


def test_dots_reach_into_tables_as_in_verl_s_data():
    row = {"prompt": [QUESTION], "reward_model": {"style": "rule", "ground_truth": "2"}}
    assert rows_of([row], answer="{reward_model.ground_truth}")[0].meta["answer"] == "2"
    with pytest.raises(DataError, match=r"row 0: data.answer.*there is no 'truth'.*style"):
        rows_of([row], answer="{reward_model.truth}")[0]


@pytest.mark.parametrize(
    "value, words",
    [
        (["a", "b"], r"'q' is a list, .*\(\{q\[0\]\}\)"),
        ({"text": "a"}, r"'q' is a table, .*\(\{q\.text\}\)"),
        ((1, 2), "'q' is a list"),
        ([QUESTION], "'q' is a list"),  # a chat inside of a text
    ],
)
def test_a_list_or_a_table_in_a_text_is_refused_with_row_and_key(value, words):
    with pytest.raises(DataError, match=f"row 1: data.prompt = .*{words}"):
        rows_of([{"q": "fine"}, {"q": value}], prompt="Q: {q}")[1]


def test_what_is_in_a_list_or_written_on_purpose_is_a_text():
    rows = rows_of([{"q": ["a", "b"]}], prompt="{q[1]} of {q!r}")
    assert rows[0].prompt == "b of ['a', 'b']"
