"""Rows to examples, what `check` finds, and the order in which rows are drawn."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from helpers.paths import GSM8K
from hypothesis import given, settings, strategies as st

from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.data.examples import ExampleSet
from hybridflow.core.data.rows import Rows, data_problems
from hybridflow.core.data.sampler import Sampler
from hybridflow.core.errors import ConfigError, DataError, PluginError
from hybridflow.core.plugins.resolve import build_tokenizer, load_source

DIGITS = build_tokenizer(TokenizerConfig(characters="0123456789+=-*/. "), None, list)


class ListSource(DataSource):
    """Rows given by the test."""

    def __init__(self, config, rows):
        super().__init__(config)
        self.rows, self.reads = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.reads += 1
        return self.rows[i]


class ChatTokenizer:
    """DIGITS with a chat template of its own, so that no Hugging Face folder is needed."""

    def __getattr__(self, name):
        return getattr(DIGITS, name)

    def apply_chat_template(self, messages):
        return np.concatenate([DIGITS.encode(m["content"] + "=") for m in messages])


def examples(rows, tokenizer=DIGITS, **config):
    config = DataConfig(**config)
    return ExampleSet(ListSource(config, rows), config, tokenizer)


def sums(n):
    return [{"a": a, "b": 7, "text": f"{a}+7=", "answer": str(a + 7)} for a in range(n)]


def test_templates_make_the_prompt_the_response_and_the_answer():
    data = examples(sums(3), prompt="{a:02d}+{b:02d}=", response="{answer}", answer="0{answer}", bos=True)
    data.check()
    example = data[2]
    assert example.prompt_ids.dtype == example.response_ids.dtype == np.int64
    assert example.prompt_ids[0] == DIGITS.bos_id
    assert DIGITS.decode(example.prompt_ids) == "02+07="
    assert example.response_ids.tolist() == [*DIGITS.encode("9"), DIGITS.eos_id]
    assert example.meta == {"a": 2, "b": 7, "text": "2+7=", "answer": "09"}
    assert len(data) == 3


def test_a_rejected_response_is_the_worse_one_of_a_pair():
    found = examples([{"q": "1+1=", "good": "2", "bad": "3"}], prompt="{q}", response="{good}", rejected="{bad}")[0]
    assert DIGITS.decode(found.response_ids) == "2" and DIGITS.decode(found.rejected_ids) == "3"
    assert found.rejected_ids[-1] == DIGITS.eos_id
    assert "give the better one too" in data_problems(DataConfig(rejected="{bad}"))[0]
    assert "data.rejected" in data_problems(DataConfig(response="{good}", rejected="{}"))[0]
    talk = [{"chat": [{"role": "user", "content": "1+1="}], "bad": "3"}]
    with pytest.raises(DataError, match="a rejected response and no better one"):
        examples(talk, ChatTokenizer(), messages="chat", rejected="{bad}")[0]


def test_without_templates_for_them_there_is_no_response_and_the_rows_own_answer_is_kept():
    example = examples(sums(1), prompt="{text}")[0]
    assert example.response_ids is None
    assert example.meta["answer"] == "7"


def test_a_row_is_tokenised_when_it_is_first_asked_for_and_only_then():
    data = examples(sums(100), prompt="{text}")
    assert len(data) == 100 and data.rows.source.reads == 0
    assert data[5] is data[5]
    assert data.rows.source.reads == 1


def test_a_template_that_names_a_missing_field_lists_those_that_there_are():
    with pytest.raises(
        DataError,
        match=r"row 0 has no field 'txt', which data.prompt = '\{txt\}' names; did you mean 'text'\? "
        r"\(its fields: a, b, text, answer\)",
    ):
        examples(sums(2), prompt="{txt}").check()
    rows = [*sums(3), {"other": 1}]
    with pytest.raises(DataError, match=r"row 3 has no field 'text'.*its fields: other"):
        examples(rows, prompt="{text}").check()


def test_a_field_that_is_null_or_does_not_fit_the_template_is_an_error_and_not_the_text_none():
    with pytest.raises(DataError, match=r"row 0: data.prompt = '\{a\}'.*'a' is null"):
        examples([{"a": None}], prompt="{a}").check()
    with pytest.raises(DataError, match=r"row 0: data.response.*cannot be filled in: Unknown format code"):
        examples([{"a": "1"}], prompt="{a}", response="{a:02d}").check()


def test_an_overlong_prompt_is_named_with_its_length_the_limit_and_the_way_out():
    rows = [{"prompt": "1"}, {"prompt": "1+2+3"}]
    with pytest.raises(DataError, match=r'row 1: the prompt has 5 tokens.*max_prompt_tokens = 4.*overlong = "drop"'):
        examples(rows, max_prompt_tokens=4).check()
    with pytest.raises(DataError, match="has 6 tokens"):
        examples(rows, max_prompt_tokens=5, bos=True).check()
    examples(rows, max_prompt_tokens=5).check()
    examples(rows, max_prompt_tokens=0).check()


def test_overlong_rows_are_dropped_and_counted_when_asked():
    rows = [{"prompt": "1" * n} for n in (1, 9, 2, 9, 3, 9)]
    data = examples(rows, max_prompt_tokens=4, overlong="drop")
    data.check()
    assert [len(data[i].prompt_ids) for i in range(len(data))] == [1, 2, 3]
    assert data.dropped == 3
    limited = examples(rows, max_prompt_tokens=4, overlong="drop", limit=2)
    assert (len(limited), limited.dropped) == (2, 1)
    assert len(limited[1].prompt_ids) == 2
    with pytest.raises(DataError, match=r"all 6 rows .* were dropped"):
        examples([{"prompt": "11"}] * 6, max_prompt_tokens=1, overlong="drop").check()


def test_limit_takes_the_first_rows_and_indices_outside_are_refused():
    data = examples(sums(10), prompt="{text}", limit=4)
    assert len(data) == 4
    assert len(examples(sums(3), prompt="{text}", limit=4)) == 3
    for i in (4, -1):
        with pytest.raises(IndexError):
            data[i]


def test_an_empty_set_and_an_empty_prompt_are_errors():
    with pytest.raises(DataError, match="data source 'jsonl' has no rows"):
        examples([]).check()
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        examples([{"prompt": "1"}, {"prompt": ""}]).check()
    examples([{"prompt": ""}], bos=True).check()


def test_check_looks_at_no_more_rows_than_its_limit():
    data = examples([{"prompt": "1"}] * 5 + [{"prompt": "unknown"}])
    data.check(limit=5)
    with pytest.raises(DataError, match="row 5: the tokenizer does not know 'u'"):
        data.check()


def test_a_row_that_is_no_mapping_is_named():
    with pytest.raises(DataError, match="row 0 of data source 'jsonl' is a str"):
        examples(["1+1="]).check()


def test_every_match_of_a_pattern_is_a_row_over_the_fields_of_its_own():
    rows = [{"id": 1, "text": "<<1+2=3>> and <<3*4=12>>"}, {"id": 2, "text": "none"}, {"id": 3, "text": "<<5-1=4>>"}]
    data = examples(
        rows,
        pattern="<<(?P<left>[^<>=]+)=(?P<right>[^<>]+)>>",
        pattern_field="text",
        prompt="{left}=",
        answer="{right}",
    )
    data.check()
    assert [DIGITS.decode(data[i].prompt_ids) for i in range(len(data))] == ["1+2=", "3*4=", "5-1="]
    assert [data[i].meta["answer"] for i in range(3)] == ["3", "12", "4"]
    assert [data[i].meta["id"] for i in range(3)] == [1, 1, 3]


def test_a_pattern_without_a_match_or_field_says_where_it_looked():
    with pytest.raises(DataError, match=r"matches nothing in the field 'text' of any of the 2 rows.*'0\+7='"):
        examples(sums(2), pattern="(?P<x>z)", pattern_field="text")
    with pytest.raises(DataError, match=r"no field 'tex', which data.pattern_field names; did you mean 'text'"):
        examples(sums(2), pattern="(?P<x>z)", pattern_field="tex")


def test_a_chat_goes_through_the_template_and_its_last_assistant_message_is_the_response():
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    data = examples([{"chat": chat}, {"chat": chat[:1]}], ChatTokenizer(), messages="chat")
    assert DIGITS.decode(data[0].prompt_ids) == DIGITS.decode(data[1].prompt_ids) == "1+1="
    assert data[0].response_ids.tolist() == [*DIGITS.encode("2"), DIGITS.eos_id]
    assert data[1].response_ids is None


@pytest.mark.parametrize(
    "row, words",
    [
        ({"chat": "hello"}, "must be a list of messages.*'hello'"),
        ({"chat": []}, "must be a list of messages"),
        ({"chat": [{"content": "1"}]}, "must be a list of messages"),
        ({"chat": [{"role": "assistant", "content": "1"}]}, "no message before the assistant's"),
        ({"char": []}, r"no field 'chat'.*did you mean 'char'"),
    ],
)
def test_a_chat_that_is_none_is_named(row, words):
    with pytest.raises(DataError, match=words):
        examples([row], ChatTokenizer(), messages="chat").check()


def test_two_responses_for_one_chat_are_refused():
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(DataError, match=r"remove data.response"):
        examples([{"chat": chat}], ChatTokenizer(), messages="chat", response="3").check()


@pytest.mark.parametrize(
    "config, words",
    [
        (dict(prompt="{a"), "not a format template"),
        (dict(prompt="{}"), "unnamed field"),
        (dict(messages="chat", prompt="{q}"), "both given"),
        (dict(messages="chat", bos=True), "two bos tokens"),
        (dict(pattern="(?P<a>.)"), "go together"),
        (dict(pattern="(", pattern_field="t"), "not a regular expression"),
        (dict(pattern="a", pattern_field="t"), "no named group"),
    ],
)
def test_settings_that_cannot_work_are_reported(config, words):
    with pytest.raises(ConfigError, match=words):
        examples(sums(1), **config)


def test_all_problems_of_the_settings_are_reported_at_once():
    assert len(data_problems(DataConfig(prompt="{", unsafe=("a",), messages="m"))) == 3


def test_a_sources_options_are_checked_by_name_and_type():
    source = ListSource(DataConfig(source="mine", options={"splitt": "a", "n": "3"}), [])
    with pytest.raises(ConfigError) as caught:
        source.read_options(split="train", n=1)
    assert "source 'mine' has no option 'splitt'; did you mean 'split'? (options: split, n)" in caught.value.problems[0]
    assert "data.options.n of source 'mine' must be int, for example 1; got '3'" in caught.value.problems[1]
    assert ListSource(DataConfig(options={"n": 4}), []).read_options(split="x", n=1) == {"split": "x", "n": 4}


class ThreeSums(ListSource):
    def __init__(self, config):
        super().__init__(config, sums(3))


def test_a_source_of_ones_own_is_found_by_its_path_and_must_be_one(monkeypatch):
    made = types.ModuleType("made_for_test")
    made.Mine, made.other = ThreeSums, len
    monkeypatch.setitem(sys.modules, "made_for_test", made)
    assert len(load_source(DataConfig(source="made_for_test:Mine"))) == 3
    with pytest.raises(ConfigError, match=r"data\.source 'made_for_test:other'.*derived from"):
        load_source(DataConfig(source="made_for_test:other"))
    with pytest.raises(PluginError, match="did you mean 'jsonl'"):
        load_source(DataConfig(source="json"))


def test_a_tokenizer_can_be_trained_on_prompts_responses_and_answers():
    config = DataConfig(prompt="{text}", response="r{a}", answer="z{answer}")
    rows = Rows(ListSource(config, sums(2)), config)
    assert list(rows.texts()) == ["0+7=", "r0", "z7", "1+7=", "r1", "z8"]
    tokenizer = build_tokenizer(TokenizerConfig(train="char"), None, rows.texts)
    assert tokenizer.characters == "+0178=rz"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not on this machine")
def test_the_calculations_of_gsm8k_are_rows_of_their_own():
    config = DataConfig(
        path=str(GSM8K / "train.jsonl"),
        pattern=r"<<(?P<left>[0-9.+*/ -]+)=(?P<right>[0-9.]+)>>",
        pattern_field="answer",
        prompt="{left}=",
        response="{right}",
        answer="{right}",
        max_prompt_tokens=24,
        overlong="drop",
    )
    data = ExampleSet(JsonlSource(config), config, DIGITS)
    data.check()
    assert len(data) > 20_000 and data.dropped > 0
    assert DIGITS.decode(data[0].prompt_ids) == "48/2="
    assert data[0].meta["answer"] == "24"
    assert data[0].meta["question"].startswith("Natalia")


@settings(deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**40), takes=st.lists(st.integers(0, 90), max_size=8))
def test_each_epoch_is_a_permutation_however_the_rows_are_drawn(n, seed, takes):
    sampler = Sampler(n, seed)
    drawn = np.concatenate([sampler.take(k) for k in takes] + [sampler.take(-sum(takes) % n)])
    assert drawn.dtype == np.int64
    for epoch in drawn.reshape(-1, n):
        assert sorted(epoch) == list(range(n))
    assert (sampler.epoch, sampler.position) == (len(drawn) // n, 0)


@settings(deadline=None)
@given(
    n=st.integers(1, 40),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
    before=st.integers(0, 130),
    after=st.integers(0, 130),
)
def test_a_resumed_stream_equals_an_uninterrupted_one(n, seed, shuffle, before, after):
    whole = Sampler(n, seed, shuffle).take(before + after)
    first = Sampler(n, seed, shuffle)
    assert np.array_equal(first.take(before), whole[:before])
    resumed = Sampler(n, seed, shuffle)
    resumed.load_state_dict(first.state_dict())
    assert np.array_equal(resumed.take(after), whole[before:])


def test_orders_differ_between_epochs_and_seeds_and_stay_without_shuffle():
    epochs = Sampler(100, seed=1).take(200).reshape(2, 100)
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], Sampler(100, seed=2).take(100))
    assert Sampler(3, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_stream_does_not_go_on_with_other_data():
    state = Sampler(10, seed=1).state_dict()
    with pytest.raises(DataError, match="n_rows was 10 and is 9"):
        Sampler(9, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="0 rows"):
        Sampler(0)
