"""What an agent sends becomes tokens once, and what the model has made never again."""

from __future__ import annotations

import pytest
from helpers.conversations import CALL, END, TOKENIZER, ScriptedModel
from helpers.templates import family

from hybridflow.core.errors import DataError
from hybridflow.kit.chat import conversation
from hybridflow.kit.chat.conversation import (
    MOST_WAITING,
    AgentError,
    Conversation,
    EpisodeOver,
    TooManyCalls,
)
from hybridflow.kit.chat.rendering import ChatRenderer

USER = {"role": "user", "content": "1+2?"}
MORE = {"role": "user", "content": "Sure?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def test_a_later_call_goes_on_after_the_models_own_tokens():
    model = ScriptedModel()
    reply = model.chat(USER, max_tokens=7)
    turn = model.answers("It is 3")
    reply = reply.result(0)
    assert (reply.content, reply.finish_reason, reply.tool_calls) == ("It is 3", "stop", [])
    assert reply.ids.tolist() == turn.ids.tolist() and reply.logprobs.tolist() == [-0.5] * len(
        turn.ids
    )
    # As clients send it back, with fields of their own.
    again = {"role": "assistant", "content": [{"type": "text", "text": "It is 3"}], "refusal": None}
    model.chat(USER, again, MORE)
    assert model.texts() == [
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [one.max_tokens for one in model.asked] == [7, None]


def test_a_turn_that_was_cut_is_closed_by_the_template():
    model = ScriptedModel()
    reply = model.chat(USER, max_tokens=2)
    model.answers("It is", cut=True)
    assert reply.result(0).finish_reason == "length"
    model.chat(USER, reply.result(0).message, MORE)
    assert (
        model.texts()[1] == "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_of_tools_follow_their_calls_whatever_id_the_client_gives_them():
    model = ScriptedModel()
    reply = model.chat(USER, tools=[TOOL])
    model.answers(f"<think>\nhm\n</think>\n\n{CALL}")
    reply = reply.result(0)
    assert (reply.finish_reason, reply.content) == ("tool_calls", "")
    [call] = reply.tool_calls
    assert call["function"] == {"name": "add", "arguments": '{"x": 1}'}
    echoed = {
        "role": "assistant",
        "tool_calls": [{"id": "other", "function": {"name": "add", "arguments": '{"x":1}'}}],
    }
    model.chat(
        USER, echoed, {"role": "tool", "tool_call_id": "other", "content": "3"}, tools=[TOOL]
    )
    assert model.texts()[1] == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


REPLY = {"role": "assistant", "content": "It is 3"}


def rendered(*messages, tools=()) -> list[int]:
    return TOKENIZER.apply_chat_template(list(messages), list(tools)).tolist()


def answered(model: ScriptedModel, text: str, *messages, **more):
    model.script.append(text)
    return model.chat(*messages, **more).result(0).message


def test_a_changed_history_begins_a_branch_where_it_differs():
    model = ScriptedModel()
    two = answered(model, "two", USER)
    three = answered(model, "three", USER, two, MORE)
    end_of_two = len(model.turns[0]) - 1
    # Another message after the first answer, and on from both.
    other = {"role": "user", "content": "Why?"}
    four = answered(model, "four", USER, two, other)
    answered(model, "five", USER, two, MORE, three, MORE)
    answered(model, "six", USER, two, other, four, MORE)
    assert [one.after for one in model.asked][:3] == [None, None, end_of_two]
    assert model.contexts == [
        rendered(USER),
        rendered(USER, two, MORE),
        rendered(USER, two, other),
        rendered(USER, two, MORE, three, MORE),
        rendered(USER, two, other, four, MORE),
    ]
    assert [len(one.ids) > 0 for one in model.asked] == [True] * 5
    # No token was sent twice: what stands in the row are the turns, and what was sent between.
    assert len(model.row) == sum(map(len, model.turns)) + sum(
        len(one.ids) for one in model.asked[1:]
    )


def test_the_same_question_is_asked_again_without_a_token():
    model = ScriptedModel()
    first = answered(model, "two", USER)
    second = answered(model, "three", USER)
    assert (model.asked[1].ids, model.asked[1].after) == ((), -1)
    answered(model, "four", USER, first, MORE)
    answered(model, "five", USER, second, MORE)
    answered(model, "six", USER, second, MORE)
    assert model.asked[4].ids == () and model.asked[4].after is not None
    assert model.contexts == [
        rendered(USER),
        rendered(USER),
        rendered(USER, first, MORE),
        rendered(USER, second, MORE),
        rendered(USER, second, MORE),
    ]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([MORE], []),
        ([{"role": "system", "content": "x"}, USER, REPLY, MORE], []),
        ([USER, {**REPLY, "content": "It is 4"}, MORE], []),
        ([USER, REPLY, MORE], [TOOL]),
    ],
)
def test_another_beginning_is_a_conversation_of_its_own(messages, tools):
    model = ScriptedModel()
    answered(model, "It is 3", USER)
    answered(model, "4", *messages, tools=tools)
    assert model.asked[1].after == -2
    assert list(model.asked[1].ids) == model.contexts[1] == rendered(*messages, tools=tools)


def test_calls_at_the_same_time_are_answered_in_their_order():
    model = ScriptedModel()
    replies = [model.chat(USER), model.chat(USER), model.chat(MORE)]
    assert len(model.asked) == 1
    for number, reply in enumerate(replies):
        model.answers(str(number))
        assert reply.result(0).content == str(number)
    assert model.contexts == [rendered(USER), rendered(USER), rendered(MORE)]


def test_who_says_something_is_part_of_it():
    model = ScriptedModel()
    answered(model, "two", {**USER, "name": "ann"})
    answered(model, "three", {**USER, "name": "bob"})
    assert model.asked[1].after == -2 and model.asked[1].ids


def test_several_answers_are_asked_for_together_or_not_at_all():
    model = ScriptedModel()
    replies = model.conversation.several(3, [USER])
    with pytest.raises(TooManyCalls, match="3 calls of this episode wait"):
        model.conversation.several(MOST_WAITING - 2, [USER])
    for number, reply in enumerate(replies):
        model.answers(str(number))
        assert reply.result(0).content == str(number)
    assert len(model.asked) == 3


def test_a_row_is_told_right_after_a_turn_that_could_not_be_read(monkeypatch):
    def fails(text, tools, turn):
        raise MemoryError("no room")

    model = ScriptedModel()
    with monkeypatch.context() as patch:
        patch.setattr(conversation, "message_of", fails)
        reply = model.chat(USER)
        model.answers("two")
        with pytest.raises(MemoryError):
            reply.result(0)
    answered(model, "three", USER)
    answered(model, "four", {**USER, "content": "Other"})
    third = answered(model, "five", {**USER, "content": "Other"})
    answered(model, "six", {**USER, "content": "Other"}, third, MORE)
    other = {**USER, "content": "Other"}
    assert model.contexts == [
        rendered(USER),
        rendered(USER),
        rendered(other),
        rendered(other),
        rendered(other, third, MORE),
    ]


def test_calls_that_wait_when_the_episode_ends_hear_of_it():
    model = ScriptedModel()
    replies = [model.chat(USER) for _ in range(MOST_WAITING)]
    with pytest.raises(TooManyCalls, match="256 calls of this episode wait"):
        model.chat(USER)

    def over(answer):
        raise EpisodeOver("the episode has ended")

    model.conversation.ask = over
    model.futures[0].set_exception(EpisodeOver("the episode has ended"))
    for reply in replies:
        with pytest.raises(EpisodeOver):
            reply.result(0)


@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        ([USER, REPLY], {}, "the last message is the model's own"),
        ([USER, REPLY, MORE], {"max_tokens": 0}, "max_tokens is 0"),
        ([USER, REPLY, MORE], {"stop": [""]}, "a stop is empty"),
        ([], {}, "no message"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "type 'image_url'"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_changes_nothing(messages, more, said):
    model = ScriptedModel()
    answered(model, "It is 3", USER)
    with pytest.raises((AgentError, DataError), match=said):
        model.chat(*messages, **more)
    answered(model, "4", USER, REPLY, MORE)
    assert model.contexts == [rendered(USER), rendered(USER, REPLY, MORE)]


def test_what_the_template_refuses_changes_nothing():
    refuses = family("gemma2")  # it knows no system message
    model = ScriptedModel(tokenizer=refuses, end=int(refuses.encode("<end_of_turn>")[0]))
    reply = model.chat({"role": "system", "content": "x"}, USER)
    with pytest.raises(DataError):
        reply.result(0)
    answered(model, "It is 3", USER)
    assert model.contexts == [refuses.apply_chat_template([USER]).tolist()]


def test_an_agent_that_ceases_to_wait_holds_nothing_up():
    model = ScriptedModel()
    reply = model.chat(USER)
    assert not reply.cancel()
    model.answers("It is 3")
    model.chat(USER, {"role": "assistant", "content": "It is 3"}, MORE)
    assert len(model.asked) == 2 and reply.result(0).content == "It is 3"


def test_the_end_of_the_episode_reaches_who_waits_and_who_asks_again():
    model = ScriptedModel()
    reply = model.chat(USER)
    model.futures[-1].set_exception(EpisodeOver("the episode has ended"))
    with pytest.raises(EpisodeOver):
        reply.result(0)

    def over(answer):
        raise EpisodeOver("the episode has ended")

    conversation = Conversation(ChatRenderer(TOKENIZER), "hermes", over)
    for _ in range(2):
        with pytest.raises(EpisodeOver):
            conversation.chat([USER]).result(0)


def test_a_turn_that_cannot_be_read_is_an_error_for_who_waits(monkeypatch):
    def broken(*_):
        raise ValueError("no such format")

    monkeypatch.setattr("hybridflow.kit.chat.conversation.message_of", broken)
    model = ScriptedModel()
    reply = model.chat(USER)
    model.answers("It is 3")
    with pytest.raises(ValueError, match="no such format"):
        reply.result(0)


def test_a_stop_of_several_tokens_ends_the_answer_at_the_token_that_completes_it():
    model = ScriptedModel("I look.\nObservation: 3\nSo 3")
    reply = model.chat(USER, stop=["So", "Observation:"]).result(0)
    assert (reply.content, reply.stop, reply.finish_reason) == ("I look.\n", "Observation:", "stop")
    # The shortest beginning of what was sampled that has the stop.
    sampled = [*TOKENIZER.encode("I look.\nObservation: 3\nSo 3").tolist(), END]
    count = next(
        count
        for count in range(len(sampled))
        if "Observation:" in TOKENIZER.decode(sampled[:count])
    )
    assert reply.ids.tolist() == sampled[:count] and len(reply.logprobs) == count
    model.script = ["Yes"]
    model.chat(USER, reply.message, MORE, stop=["Observation:"])
    assert [one.keep for one in model.asked] == [None, count]
    # The turn did not end by itself, so its end stands before the next message.
    assert model.texts()[1].startswith("<|im_end|>\n<|im_start|>user\nSure?")
    assert model.row[:count] == sampled[:count]
    assert model.contexts[1][: -len(model.asked[1].ids)] == [*rendered(USER), *sampled[:count]]
    assert model.conversation.keep is None
    with pytest.raises(AgentError, match="a stop is empty"):
        model.chat(USER, stop=[""])
