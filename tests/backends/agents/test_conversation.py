"""What an agent sends becomes tokens once, and what the model has made never again."""

from __future__ import annotations

import pytest
from helpers.conversations import CALL, END, TOKENIZER, ScriptedModel

from hybridflow.backends.agents.conversation import AgentError, Conversation, EpisodeOver
from hybridflow.backends.agents.rendering import ChatRenderer
from hybridflow.core.errors import DataError

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


@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        ([MORE, REPLY, MORE], {}, r"message 0 was .*1\+2.* and is now .*Sure"),
        (
            [USER, {**REPLY, "content": "It is 4"}, MORE],
            {},
            "message 1 was .*It is 3.* and is now .*It is 4",
        ),
        ([USER], {}, "message 1 was .*It is 3.* and is now nothing"),
        ([USER, REPLY], {}, "no message after the model's answer"),
        ([USER, REPLY, MORE], {"tools": [TOOL]}, "the tools differ"),
        ([USER, REPLY, MORE], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_does_not_go_on_from_the_conversation_is_refused_and_changes_nothing(
    messages, more, said
):
    model = ScriptedModel()
    model.chat(USER)
    model.answers("It is 3")
    with pytest.raises(AgentError, match=said):
        model.chat(*messages, **more)
    model.chat(USER, REPLY, MORE)
    assert len(model.asked) == 2


def test_messages_that_cannot_be_rendered_change_nothing():
    model = ScriptedModel()
    with pytest.raises(AgentError, match="no message"):
        model.chat()
    with pytest.raises(DataError, match="type 'image_url'"):
        model.chat({"role": "user", "content": [{"type": "image_url"}]})
    model.chat(USER)
    assert len(model.asked) == 1


def test_one_call_at_a_time():
    model = ScriptedModel()
    model.chat(USER)
    with pytest.raises(AgentError, match="asked again before it has answered"):
        model.chat(USER)


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
            conversation.chat([USER])


def test_a_turn_that_cannot_be_read_is_an_error_for_who_waits(monkeypatch):
    def broken(*_):
        raise ValueError("no such format")

    monkeypatch.setattr("hybridflow.backends.agents.conversation.message_of", broken)
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
    prompt = TOKENIZER.apply_chat_template([USER]).tolist()
    assert model.row[: len(prompt) + count] == [*prompt, *sampled[:count]]
    assert model.conversation.keep is None
    with pytest.raises(AgentError, match="a stop is empty"):
        model.chat(USER, stop=[""])
