"""Conversations: pieces that make up the engine's answer, templates, and what is remembered."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import DataError
from hybridflow.core.running.session import prepare
from hybridflow.inference.engine import started
from hybridflow.inference.job import on_one_device, resolve, with_overrides
from hybridflow.inference.models import find_model
from hybridflow.inference.talk import Talk, has_template

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def engine(sums, tmp_path_factory):
    found = find_model(str(sums))
    tables = on_one_device(found, tmp_path_factory.mktemp("logs"))
    job = resolve(with_overrides(tables, [], found))
    assert job.data.max_prompt_tokens == 28  # not the 8 of the run's data
    with started(job) as engine:
        yield engine, prepare(job, sets={}).tokenizer, job


class Chatty:
    """The run's tokenizer with a chat template: each message in full, then "="."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages, tools=(), options=None, complete=False):
        return self._tokenizer.encode("".join(message["content"] for message in messages) + "=")


def talk(engine, tokenizer=None, plain=True, data=None, room=32) -> Talk:
    started, own, job = engine
    return Talk(started, tokenizer or own, GREEDY, data or job.data, plain, room)


def test_pieces_make_up_the_answer_of_the_engine(engine):
    pieces = list(talk(engine).answer("12+34="))
    started, tokenizer, _ = engine
    prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode("12+34=")])
    [whole] = started.generate([Request(0, prompt, GREEDY)])
    assert "".join(pieces) == tokenizer.decode(whole.response_ids)
    assert len(pieces) > 1


def test_the_data_s_template_takes_the_question(engine):
    asked = talk(engine, data=DataConfig(prompt="{a}="))
    assert engine[1].decode(asked.prompt_ids("1+2")) == "1+2="
    # With several fields, or one inside a table, the question stands by itself.
    for template in ("{a}+{b}=", "{a.b}="):
        asked = talk(engine, data=DataConfig(prompt=template))
        assert engine[1].decode(asked.prompt_ids("1+2=")) == "1+2="


def test_a_conversation_remembers(engine):
    chat = talk(engine, Chatty(engine[1]), plain=False)
    chat.system = "7"
    first = "".join(chat.answer("1"))
    assert chat.messages == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": first},
    ]
    assert engine[1].decode(chat.prompt_ids("2")) == f"71{first}2="
    chat.reset()
    assert engine[1].decode(chat.prompt_ids("2")) == "72="


def test_a_conversation_that_fills_the_model_says_so(engine):
    with pytest.raises(DataError, match="has 33 tokens, and there is room for 32: /reset"):
        list(talk(engine).answer("1" * 32))
    # What room there is is used.
    assert len("".join(talk(engine).answer("1" * 29))) <= 2


def test_an_empty_question_and_one_that_cannot_be_spelled_are_refused(engine):
    with pytest.raises(DataError, match="the question is empty"):
        list(talk(engine, data=DataConfig()).answer(""))
    with pytest.raises(DataError):
        list(talk(engine).answer("hello"))


def test_a_tokenizer_says_whether_it_writes_chats(engine):
    assert not has_template(engine[1])
    assert has_template(Chatty(engine[1]))
