"""Rows become tokens, and what `check` finds before a run."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sources import ListSource, sums

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.data.examples import ExampleSet
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.plugins.resolve import build_tokenizer

DIGITS = build_tokenizer(TokenizerConfig(characters="0123456789+=-*/. "), None, list)


class ChatTokenizer:
    """DIGITS with a chat template of its own, so that no Hugging Face folder is needed.

    "(number of tools.)(options' lead)question=*answer<eos> question=*", where "*" opens the assistant's turn.
    """

    def __getattr__(self, name):
        return getattr(DIGITS, name)

    def apply_chat_template(self, messages, tools=(), options=None, complete=False):
        options = options or {}
        head = (f"{len(tools)}." if tools else "") + options.get("lead", "")
        parts = [DIGITS.encode(head)]
        for message in messages:
            if message["role"] == "assistant":
                turn = DIGITS.encode(options.get("opening", "*") + message["content"])
                parts += [turn, [DIGITS.eos_id], DIGITS.encode(" ")]
            else:
                parts.append(DIGITS.encode(message["content"] + "="))
        if not complete:
            parts.append(DIGITS.encode("*"))
        return np.concatenate(parts).astype(np.int64)


def examples(rows, tokenizer=DIGITS, **config):
    config = DataConfig(**config)
    return ExampleSet(ListSource(config, rows), config, tokenizer)


def test_templates_make_the_prompt_the_response_and_the_answer():
    data = examples(
        sums(3), prompt="{a:02d}+{b:02d}=", response="{answer}", answer="0{answer}", bos=True
    )
    data.check()
    example = data[2]
    assert example.prompt_ids.dtype == example.response_ids.dtype == np.int64
    assert example.prompt_ids[0] == DIGITS.bos_id
    assert DIGITS.decode(example.prompt_ids) == "02+07="
    assert example.response_ids.tolist() == [*DIGITS.encode("9"), DIGITS.eos_id]
    assert example.meta == {"a": 2, "b": 7, "text": "2+7=", "answer": "09"}
    assert len(data) == 3


def test_a_rejected_response_is_the_worse_one_of_a_pair():
    found = examples(
        [{"q": "1+1=", "good": "2", "bad": "3"}], prompt="{q}", response="{good}", rejected="{bad}"
    )[0]
    assert DIGITS.decode(found.response_ids) == "2" and DIGITS.decode(found.rejected_ids) == "3"
    assert found.rejected_ids[-1] == DIGITS.eos_id
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


def test_an_overlong_prompt_is_named_with_its_length_the_limit_and_the_way_out():
    rows = [{"prompt": "1"}, {"prompt": "1+2+3"}]
    with pytest.raises(
        DataError, match=r'row 1.* 5 tokens.*max_prompt_tokens = 4.*overlong = "drop"'
    ):
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


def test_a_prompt_of_ones_own_is_made_like_those_of_rows():
    data = examples(sums(3), prompt="{text}", bos=True, max_prompt_tokens=6)
    example = data.prompt("12+3=")
    assert example.prompt_ids.tolist() == [DIGITS.bos_id, *DIGITS.encode("12+3=")]
    assert example.response_ids is None and example.meta == {}
    with pytest.raises(DataError, match=r"has 7 tokens: '123[+]4='; .*max_prompt_tokens = 6"):
        data.prompt("123+4=")
    with pytest.raises(DataError, match="has 0 tokens"):
        examples(sums(3), prompt="{text}").prompt("")

    options = {"lead": "7"}
    chats = examples(sums(3), ChatTokenizer(), prompt="{text}", chat_template_kwargs=options)
    assert DIGITS.decode(chats.prompt([user("1+1")]).prompt_ids) == "71+1=*"


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


def test_a_bos_needs_a_tokenizer_that_has_one():
    class WithoutBos(ChatTokenizer):
        bos_id = None

    with pytest.raises(ConfigError, match="the tokenizer has no bos token"):
        examples(sums(1), WithoutBos(), prompt="{text}", bos=True)


def test_check_looks_at_no_more_rows_than_its_limit():
    data = examples([{"prompt": "1"}] * 5 + [{"prompt": "unknown"}])
    data.check(limit=5)
    with pytest.raises(DataError, match="row 5: the tokenizer does not know 'u'"):
        data.check()


def test_a_chat_goes_through_the_template_and_its_last_assistant_message_is_the_response():
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    data = examples([{"chat": chat}, {"chat": chat[:1]}], ChatTokenizer(), messages="chat")
    assert DIGITS.decode(data[0].prompt_ids) == DIGITS.decode(data[1].prompt_ids) == "1+1=*"
    assert data[0].response_ids.tolist() == [*DIGITS.encode("2"), DIGITS.eos_id]
    assert data[1].response_ids is None


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


ASKED = [user("1+1")]
TRL = {
    "prompt and completion": (
        {"prompt": ASKED, "completion": [reply("2")]},
        {"response": "{completion}"},
    ),
    "a preference with a prompt": (
        {"prompt": ASKED, "chosen": [reply("2")], "rejected": [reply("3")]},
        {"response": "{chosen}", "rejected": "{rejected}"},
    ),
    "a preference with the prompt in it": (
        {"chosen": [*ASKED, reply("2")], "rejected": [*ASKED, reply("3")]},
        {"response": "{chosen}", "rejected": "{rejected}"},
    ),
    "a text prompt beside whole chats": (
        {"prompt": "1+1", "chosen": [*ASKED, reply("2")], "rejected": [*ASKED, reply("3")]},
        {"response": "{chosen}", "rejected": "{rejected}"},
    ),
    "a prompt that the chats repeat": (
        {"prompt": ASKED, "chosen": [*ASKED, reply("2")], "rejected": [*ASKED, reply("3")]},
        {"response": "{chosen}", "rejected": "{rejected}"},
    ),
}


@pytest.mark.parametrize("form", TRL)
def test_conversations_of_trl_are_read_as_they_are(form):
    row, config = TRL[form]
    example = examples([row], ChatTokenizer(), **config)[0]
    assert DIGITS.decode(example.prompt_ids) == "1+1=*"
    assert example.response_ids.tolist() == [*DIGITS.encode("2"), DIGITS.eos_id]
    if "rejected" in config:
        assert example.rejected_ids.tolist() == [*DIGITS.encode("3"), DIGITS.eos_id]


def test_a_prompt_alone_may_be_a_chat():
    example = examples([{"prompt": [*ASKED, reply("2"), user("2+2")]}], ChatTokenizer())[0]
    assert DIGITS.decode(example.prompt_ids, skip_special=True) == "1+1=*2 2+2=*"
    assert example.response_ids is None


def test_several_turns_of_an_answer_are_trained_to_their_last_end():
    row = {"prompt": ASKED, "completion": [reply("2"), user("3+3"), reply("6")]}
    example = examples([row], ChatTokenizer(), response="{completion}")[0]
    eos = DIGITS.eos_id
    after = [*DIGITS.encode("2"), eos, *DIGITS.encode(" 3+3=*6"), eos]
    assert example.response_ids.tolist() == after


def test_tools_and_template_options_of_the_row_reach_the_template():
    row = {"prompt": ASKED, "tools": '[{"name": "add"}]', "chat_template_kwargs": {"lead": "7"}}
    data = examples([row, {"prompt": ASKED}], ChatTokenizer(), chat_template_kwargs={"lead": "5-"})
    assert DIGITS.decode(data[0].prompt_ids) == "1.71+1=*"
    assert DIGITS.decode(data[1].prompt_ids) == "5-1+1=*"


def test_a_template_that_opens_a_turn_otherwise_than_it_writes_it_is_refused():
    row = {"prompt": ASKED, "completion": [reply("2")], "chat_template_kwargs": {"opening": "/"}}
    with pytest.raises(DataError, match=r"row 0: the chat template does not write the answer"):
        examples([row], ChatTokenizer(), response="{completion}")[0]
