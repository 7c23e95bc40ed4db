"""From messages to tokens, without rendering anything twice.

    begin    the prompt: an agent's first messages, and the opening of the model's turn
    follow   between two turns of the model: the closing of the first one, what the agent has sent
             since, and the opening of the second

What `follow` gives does not depend on what came before the turn: it is read off a chat of two short
messages, so its cost does not grow with the conversation. That a tokenizer's template allows this
is shown when a run is prepared (`check`).
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.values.text import shorten

Message = Mapping[str, Any]
"""A message in the form of OpenAI's chat completions."""
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
TURNS = ("a", "b")
"""Two turns of the model."""
TRIES = 20
"""Number of random conversations of a proof."""
WORDS = ("", "no", "Yes.", "two\nlines\n", " 12 + 3 = ", "<b>é</b>", "\u2603")
PLAIN = "by which messages are their contents alone"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
    for name in ("add", "look_up")
]


class Renderer(ABC):
    """From messages to tokens, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def check(self, plain: str) -> str:
        """Raise ConfigError where the tokenizer cannot be used; return a remark, or "".

        plain: how a PlainRenderer is asked for, as "set x = y".
        """
        return ""

    @abstractmethod
    def begin(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of a conversation up to the model's first turn. Raises DataError."""

    @abstractmethod
    def follow(
        self, last: int | None, messages: Sequence[Message], tools: Sequence[Any]
    ) -> list[int]:
        """Return the tokens between a turn of the model and its next.

        last: the token that ended the turn, None where its limit did; messages: those after it.
        Raises DataError.
        """


class PlainRenderer(Renderer):
    """Messages are their contents, one after the other, for models that know no chat."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of the contents, without the names of their roles."""
        if tools:
            raise DataError("a plain conversation has no tools: no template tells the model of any")
        ids: list[int] = self.tokenizer.encode("".join(map(content, messages))).tolist()
        return ids

    def follow(
        self, last: int | None, messages: Sequence[Message], tools: Sequence[Any]
    ) -> list[int]:
        """Return the tokens of the contents."""
        return self.begin(messages, tools)


class ChatRenderer(Renderer):
    """Messages by the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None):
        """options: further values for the template, such as enable_thinking."""
        super().__init__(tokenizer)
        self.options = dict(options or {})

    def begin(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of all messages, and of the opening of the model's turn."""
        return self._rendered(messages, tools)

    def follow(
        self, last: int | None, messages: Sequence[Message], tools: Sequence[Any]
    ) -> list[int]:
        """Return the tokens that the template puts between the turns."""
        # Two chats that differ in a turn of the model alone are equal from its closing on.
        one, other = (
            self._rendered([USER, {"role": "assistant", "content": text}, *messages], tools)
            for text in TURNS
        )
        if one == other:
            raise DataError("the chat template leaves out what the model has said")
        between = _common_end(one, other)
        return between[1:] if between and between[0] == last else between

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Any], complete: bool = False
    ) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, tools, self.options, complete
        ).tolist()
        return ids

    def check(self, plain: str) -> str:
        """Show with random conversations that what follows a turn does not depend on others.

        Returns a remark where the template writes earlier turns differently once others follow.
        Raises ConfigError for a template by which no turn can be followed, or a tokenizer without
        one.
        """
        try:
            self._rendered([USER], ())
        except DataError as error:
            raise ConfigError(f"{error}; or {plain}, {PLAIN}") from error
        remark = ""
        for before, turn, after, tools in self._conversations():
            try:
                between = self.follow(None, after, tools)
                whole = self._rendered([*before, turn, *after], tools)
                said = self._rendered([*before, turn], tools, complete=True)
            except DataError as error:
                raise ConfigError(f"the chat template: {error}; {plain}, {PLAIN}") from error
            if whole[-len(between) :] != between:
                raise ConfigError(
                    "the chat template is not append-only: after "
                    f"{shorten(str([*before, turn]))} it writes {shorten(str(after))} differently "
                    f"than elsewhere; {plain}, {PLAIN}, or give the tokenizer another template"
                )
            # What stands between the last turn's beginning and its closing is the model's own.
            if not remark and whole[: len(said)] != said:
                remark = (
                    f"the chat template writes {shorten(str([*before, turn]))} differently once "
                    f"{shorten(str(after))} follows; agents train with the tokens as they were "
                    "made, and a server that renders each call anew has others"
                )
        return remark

    def _conversations(self) -> Iterator[Any]:
        return conversations(self._takes_tools(), self._takes_system())

    def _takes_tools(self) -> bool:
        """Return whether the template knows tools; it may refuse them, or leave them out."""
        calls = [_call(0, {"x": 1})]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        heard = {"role": "tool", "tool_call_id": calls[0]["id"], "name": "add", "content": "2"}
        try:
            with_tools = self._rendered([USER, said, heard], TOOLS)
        except DataError:
            return False
        return with_tools != self._rendered([USER, said, heard], ())

    def _takes_system(self) -> bool:
        """Return whether the template knows a system message."""
        try:
            self._rendered([SYSTEM, USER], ())
        except DataError:
            return False
        return True


def conversations(
    tools: bool, system: bool
) -> Iterator[tuple[list[Message], Message, list[Message], list[Any]]]:
    """Yield (messages before, a turn of the model, messages after it, tools), always the same.

    tools, system: whether there may be tools, and a system message.
    """
    draws = random.Random(0)
    for number in range(TRIES):
        offered = TOOLS if tools and number % 2 else []
        before: list[Message] = []
        if system and draws.random() < 0.5:
            before.append({**SYSTEM, "content": draws.choice(WORDS)})
        before.append({"role": "user", "content": draws.choice(WORDS)})
        for _ in range(draws.randrange(3)):
            before += _turn_and_answer(draws, bool(offered))
        turn, *after = _turn_and_answer(draws, bool(offered))
        yield before, turn, after, offered


def _turn_and_answer(draws: random.Random, tools: bool) -> list[Message]:
    turn: dict[str, Any] = {"role": "assistant", "content": draws.choice(WORDS)}
    if not tools or draws.random() < 0.5:
        return [turn, {"role": "user", "content": draws.choice(WORDS)}]
    calls = [_call(number, {"x": draws.randrange(9)}) for number in range(draws.choice((1, 2)))]
    answers = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": draws.choice(WORDS),
        }
        for call in calls
    ]
    return [{**turn, "tool_calls": calls}, *answers]


def _call(number: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    name = TOOLS[number % len(TOOLS)]["function"]["name"]
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the tokens with which both end."""
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return list(one[len(one) - count :])


def content(message: Message) -> str:
    """Return the text of a message. Raises DataError for parts that are no text."""
    found = message.get("content")
    if found is None:
        return ""
    if isinstance(found, str):
        return found
    texts = []
    for part in found if isinstance(found, list) else [found]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "input_text", "output_text"):
            raise DataError(f"a message has a part of type {kind!r}; only text can be rendered")
        if not isinstance(part.get("text"), str):
            raise DataError(f"a message has the part {shorten(str(part))}, without a text")
        texts.append(part["text"])
    return "".join(texts)


def normalised(message: Message) -> dict[str, Any]:
    """Return what a template reads of a message: content as text, arguments of calls as objects.

    Raises DataError for a message that is none.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"got {shorten(str(message))}; a message is a dict with role and content")
    made: dict[str, Any] = {"role": message["role"], "content": content(message)}
    if message["role"] == "developer":  # OpenAI's newer name, which templates do not know
        made["role"] = "system"
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            made[name] = message[name]
    if calls := message.get("tool_calls"):
        try:
            made["tool_calls"] = [_normalised_call(call) for call in calls]
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"tool_calls is {shorten(str(calls))}; a call is {{id, type, function: {{name, "
                "arguments}}"
            ) from error
    return made


def _normalised_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": call["function"]["name"],
        "arguments": _arguments(call["function"].get("arguments")),
    }
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _arguments(given: Any) -> Any:
    """Return the arguments of a call as an object, where they are JSON; clients send a text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
