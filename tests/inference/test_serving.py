"""A server's conversations: each answer is the engine's, after the tokens that the messages stand for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hybridflow.core.contracts.rollout import Request, SamplingParams
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.running.session import prepare
from hybridflow.inference import serving
from hybridflow.inference.engine import started
from hybridflow.inference.job import on_one_device, resolve, with_overrides
from hybridflow.inference.models import find_model
from hybridflow.inference.serving import Desk
from hybridflow.kit.chat.conversation import AgentError
from hybridflow.kit.chat.rendering import PlainRenderer

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def engine(sums, tmp_path_factory):
    found = find_model(str(sums))
    tables = on_one_device(found, tmp_path_factory.mktemp("logs"))
    job = resolve(with_overrides(tables, [], found))
    with started(job) as engine:
        yield engine, prepare(job, sets={}).tokenizer


@pytest.fixture
def desk(engine):
    """One whose engine runs in a thread; `begin` starts it, since nobody else may use the engine then."""
    model, tokenizer = engine
    made = Desk(model, tokenizer, PlainRenderer(tokenizer), GREEDY, room=32, tools="none")
    ended = threading.Event()
    thread = threading.Thread(target=made.serve, args=(ended.is_set,))
    yield made, thread.start
    ended.set()
    if thread.is_alive():
        thread.join(20)


def greedy(engine, context) -> list[int]:
    """What the engine says after these tokens."""
    [done] = engine[0].generate([Request(0, np.array(context), GREEDY)])
    return done.response_ids.tolist()


def chat(desk, messages, **more):
    return desk.several(1, messages, **more)[0]


def said(text: str) -> dict:
    return {"role": "user", "content": text}


def test_answers_are_the_engines_after_the_tokens_of_the_conversation(engine, desk):
    desk, begin = desk
    encode = engine[1].encode
    one = encode("12+3=").tolist()
    first = greedy(engine, one)
    two = [*one, *first, *encode("+4=").tolist()]
    second = greedy(engine, two)
    other = [*one, *first, *encode("+5=").tolist()]
    branch = greedy(engine, other)
    on = [*other, *branch, *encode("7=").tolist()]
    alone = encode("9=").tolist()
    expected = [first, second, branch, greedy(engine, on), greedy(engine, alone), first]
    begin()

    reply = chat(desk, [said("12+3=")]).result(20)
    held = [said("12+3="), reply.message]
    replies = [reply, *(chat(desk, [*held, said(text)]) for text in ("+4=", "+5="))]
    replies[1:] = [one.result(20) for one in replies[1:]]
    replies.append(chat(desk, [*held, said("+5="), replies[2].message, said("7=")]).result(20))
    replies.append(chat(desk, [said("9=")]).result(20))
    # The same first question is another conversation, which does not wait for the first.
    replies.append(chat(desk, [said("12+3=")]).result(20))
    assert [one.ids.tolist() for one in replies] == expected
    assert [one.before for one in replies[:5]] == [len(c) for c in (one, two, other, on, alone)]
    assert desk.answered == 6 and len(desk._conversations) == 3


def stopped(engine) -> tuple[list[int], str, list[int]]:
    """A first answer, the text of its first token, and the tokens of a next question after that token."""
    encode = engine[1].encode
    one = encode("12+3=").tolist()
    first = greedy(engine, one)
    kept = [*one, *first[:1], *encode("4=").tolist()]
    return first, engine[1].decode(first[:1]), kept


def test_an_answer_that_a_stop_has_ended_is_gone_on_from_where_it_ended(engine, desk):
    desk, begin = desk
    first, stop, kept = stopped(engine)
    expected = greedy(engine, kept)
    begin()
    reply = chat(desk, [said("12+3=")], stop=[stop]).result(20)
    assert (reply.content, reply.stop) == ("", stop) and reply.ids.tolist() == first[:1]
    again = chat(desk, [said("12+3="), reply.message, said("4=")]).result(20)
    assert again.ids.tolist() == expected and again.before == len(kept)


def test_a_question_that_was_refused_changes_nothing(engine, desk):
    desk, begin = desk
    _, stop, kept = stopped(engine)
    second = greedy(engine, kept)
    on = [*kept, *second, *engine[1].encode("5=").tolist()]
    expected = [second, greedy(engine, on), second]
    begin()
    held = [said("12+3="), chat(desk, [said("12+3=")], stop=[stop]).result(20).message]
    with pytest.raises(AgentError, match="there is room for 32"):
        chat(desk, [*held, said("1" * 40)]).result(20)
    reply = chat(desk, [*held, said("4=")]).result(20)
    last = chat(desk, [*held, said("4="), reply.message, said("5=")]).result(20)
    again = chat(desk, [*held, said("4=")]).result(20)
    assert [one.ids.tolist() for one in (reply, last, again)] == expected
    assert [one.before for one in (reply, last, again)] == [len(kept), len(on), len(kept)]


def test_what_the_engine_refuses_is_told_to_its_client_alone(engine, desk, monkeypatch):
    desk, begin = desk
    expected = greedy(engine, engine[1].encode("1="))
    begin()
    for nothing in ("", engine[1].decode([])):
        with pytest.raises(AgentError, match="the messages are empty"):
            chat(desk, [said(nothing)]).result(20)
    add = engine[0].add

    def refuses(request):
        if len(request.prompt_ids) == 3:
            raise HybridFlowError("three tokens")
        add(request)

    monkeypatch.setattr(engine[0], "add", refuses)
    with pytest.raises(AgentError, match="the engine refuses it: three tokens"):
        chat(desk, [said("12=")]).result(20)
    assert chat(desk, [said("1=")]).result(20).ids.tolist() == expected


def test_a_tree_without_end_is_begun_anew(desk, monkeypatch):
    monkeypatch.setattr(serving, "LONGEST", 1)
    desk, begin = desk
    begin()
    held = [said("1="), chat(desk, [said("1=")]).result(20).message]
    for _ in range(20):
        assert chat(desk, [*held, said("2=")]).result(20).before > 4
    assert max(len(row.ids) for _, row in desk._conversations) < 32 + 10


def test_many_conversations_are_answered_at_the_same_time(engine, desk):
    desk, begin = desk
    texts = [f"{number}+{number}=" for number in range(30)]
    expected = [greedy(engine, engine[1].encode(text)) for text in texts]
    begin()
    replies = [chat(desk, [said(text)]) for text in texts]
    assert [one.result(20).ids.tolist() for one in replies] == expected


def test_a_conversation_without_room_for_an_answer_is_refused(desk):
    desk, begin = desk
    begin()
    with pytest.raises(
        AgentError, match="the conversation has 40 tokens, and there is room for 32"
    ):
        chat(desk, [said("1" * 40)]).result(20)
    reply = chat(desk, [said("1" * 30)]).result(20)
    assert len(reply.ids) <= 2


def test_conversations_that_were_not_used_for_longest_are_forgotten(engine, desk, monkeypatch):
    monkeypatch.setattr(serving, "CONVERSATIONS", 2)
    desk, begin = desk
    begin()
    held = []
    for text in ("1=", "2=", "3="):
        held.append([said(text), chat(desk, [said(text)]).result(20).message, said("4=")])
    before = [chat(desk, messages).result(20).before for messages in held[::-1]]
    # All are gone on from; of the first one what the model had said is text.
    assert len(desk._conversations) == 2 and len(before) == 3
