"""One episode's messages and tokens, as an agent makes them by asking the model.

A call whose messages begin with those of an earlier one and the model's answer goes on after its
tokens: only what the agent has added becomes tokens. So calls form a tree, of which a history that
was changed begins another:

    system, user -> turn 0 -> tool -> turn 1       goes on
                           -> user -> turn 2       goes on from turn 0
                 -> turn 3                         the same question once more
    system, summary -> turn 4                      a conversation of its own
"""

from __future__ import annotations

import bisect
import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.environment import Answer, Turn
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.branches import AFTER_PROMPT, ALONE
from hybridflow.kit.chat.parsing import message_of
from hybridflow.kit.chat.rendering import Message, Renderer, normalised


class AgentError(HybridFlowError):
    """An agent asked the model for what cannot be; told to the agent, not to the run."""


class TooManyCalls(AgentError):
    """An agent asks faster than the model answers."""


class EpisodeOver(AgentError):
    """The episode of an agent that asks the model has ended, by a limit or with the run."""


@attrs.frozen(eq=False)
class Reply:
    """What the model has answered."""

    message: dict[str, Any]
    """The turn as a message, to be put after those that were sent: role, content, and where it has
    them `reasoning_content` and `tool_calls`."""
    finish_reason: str
    """"stop", "tool_calls", or "length" where max_tokens ended it."""
    stop: str | None
    """The text of `chat`'s stops that ended it."""
    ids: np.ndarray
    """Its tokens, int64 [T]."""
    logprobs: np.ndarray
    """Their log-probabilities, float32 [T]."""
    before: int
    """Number of tokens that the model has read before."""

    @property
    def content(self) -> str:
        """Its text, without thinking and calls of tools."""
        text: str = self.message["content"]
        return text

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Its calls of tools, in the form of OpenAI's chat completions."""
        return list(self.message.get("tool_calls", ()))


MOST_WAITING = 256
"""Calls of one episode that may wait."""
Ask = Callable[[Answer], "Future[Turn]"]
"""The tokens to go on after, and the turn's limit -> the model's turn."""


@attrs.frozen
class _Point:
    """A place in the row at which a later call can go on."""

    at: int
    """Index of its last token, as in Answer.after."""
    size: int
    """Number of tokens up to it, the prompt's among them."""
    turn: bool
    """Whether it is the end of a turn of the model, or stands before one."""
    last: int | None = None
    """The token that ended the turn; None where its limit did."""


@attrs.define(eq=False)
class _Call:
    sent: list[dict[str, Any]]
    tools: list[Any]
    max_tokens: int | None
    stop: Sequence[str]
    reply: Future[Reply] = attrs.field(factory=Future)
    keys: list[bytes] = attrs.field(factory=list)
    """Digests of its tools, and of them and its messages up to each one."""


class Conversation:
    """The messages and tokens of one episode.

    Calls may come from any thread. The model answers them one after the other, in their order.
    """

    def __init__(self, renderer: Renderer, tools: str, ask: Ask):
        """tools: the format of the model's calls (parsing.py)."""
        self.renderer = renderer
        self.format = tools
        self.ask = ask
        self.turns = 0
        self.keep: int | None = None
        """Number of tokens of the model's last turn that stay; None: all."""
        self._length = 0
        """Number of tokens of the row, whose prompt does not count."""
        self._points: dict[bytes, _Point] = {}
        """By a digest of the tools and the messages so far."""
        self._waiting: deque[_Call] = deque()
        """The call that the model answers now, and those after it."""
        self._lock = threading.Lock()

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Future[Reply]:
        """Have the model answer these messages.

        stop: texts of which the first to come ends the answer, which does not have it. Its tokens
        stay, and those after it are as if never made.

        Raises AgentError for what cannot be asked, DataError for what cannot be rendered (by the
        future); the conversation is then as before.
        """
        return self.several(1, messages, tools, max_tokens, stop)[0]

    def several(
        self,
        count: int,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Future[Reply]]:
        """Have the model answer these messages so many times, as `chat` does."""
        sent = [normalised(message) for message in messages]
        if not sent:
            raise AgentError("the model is asked with no message; send one at least")
        if sent[-1]["role"] == "assistant":
            raise AgentError(
                "the last message is the model's own, and it begins its answers itself; send a "
                "message after it"
            )
        if not all(stop):
            raise AgentError("a stop is empty; give texts")
        if max_tokens is not None and max_tokens < 1:
            raise AgentError(f"max_tokens is {max_tokens}; ask for at least one token")
        calls = [_Call(sent, list(tools), max_tokens, stop) for _ in range(count)]
        for call in calls:
            # An agent may cease to wait; the turn comes all the same.
            call.reply.set_running_or_notify_cancel()
        with self._lock:
            if len(self._waiting) + count > MOST_WAITING:
                raise TooManyCalls(
                    f"{len(self._waiting)} calls of this episode wait for the model, which answers "
                    f"one after the other, and {MOST_WAITING} may; wait for answers first"
                )
            alone = not self._waiting
            self._waiting.extend(calls)
        if alone:
            self._serve()
        return [call.reply for call in calls]

    def goes_on(self, keys: Sequence[bytes]) -> bool:
        """Return whether a call with these `keys_of` goes on from a turn of the model here."""
        point, _ = self._found(keys)
        return point is not None and point.at != AFTER_PROMPT

    def _serve(self) -> None:
        """Ask the model for the calls that wait, until it answers one of them."""
        more = True
        while more:
            call = self._waiting[0]
            try:
                self.ask(self._asked(call)).add_done_callback(partial(self._answered, call))
                return
            except BaseException as error:
                more = self._end(call, error)

    def _answered(self, call: _Call, done: Future[Turn]) -> None:
        try:
            result: Reply | BaseException = self._took(call, done.result())
        except BaseException as error:
            result = error
        if self._end(call, result):
            self._serve()

    def _end(self, call: _Call, result: Reply | BaseException) -> bool:
        """Give out the result of the first call that waits; return whether there are others."""
        with self._lock:
            self._waiting.popleft()
            more = bool(self._waiting)
        if isinstance(result, Reply):
            call.reply.set_result(result)
        else:
            call.reply.set_exception(result)
        return more

    def _asked(self, call: _Call) -> Answer:
        """Return a call's tokens, and where they go on. Raises DataError."""
        call.keys = keys_of(call.sent, call.tools)
        point, new = self._found(call.keys)
        first = not self._points
        if point is None:
            ids = self.renderer.begin(call.sent, call.tools)
            after = None if first else ALONE
            size = len(ids)
        else:
            ids = []
            if point.turn:
                ids = self.renderer.follow(point.last, call.sent[-new:], call.tools)
            # Behind the row's last token it goes on as ever.
            after = point.at if point.at < self._length - 1 else None
            size = point.size + len(ids)
        if not first:  # whose tokens are the row's prompt
            self._length += len(ids)
        at = self._length - 1 if ids or point is None else point.at
        self._points[call.keys[-1]] = _Point(at, size, turn=False)
        return Answer(ids=tuple(ids), max_tokens=call.max_tokens, after=after, keep=self.keep)

    def _found(self, keys: Sequence[bytes]) -> tuple[_Point | None, int]:
        """Return where a call goes on, if it does, and the number of messages since then."""
        for new, key in enumerate(reversed(keys)):
            point = self._points.get(key)
            # The model has the word after what an agent has said, and an agent after the model.
            if point is not None and point.turn == (new > 0):
                return point, new
        return None, 0

    def _took(self, call: _Call, turn: Turn) -> Reply:
        """Hold a turn of the model; return it."""
        found = [(at, stop) for stop in call.stop if (at := turn.text.find(stop)) >= 0]
        at, stop = min(found, default=(len(turn.text), None))
        kept = len(turn.ids)
        if stop is not None:
            kept = self._tokens_to(turn, at + len(stop))
        # First of all where the row is, whatever its text is like.
        number = self.turns
        self.turns += 1
        self.keep = None if kept == len(turn.ids) else kept
        self._length += kept

        message = message_of(turn.text[:at], self.format, number)
        calls = "tool_calls" if message.get("tool_calls") else "stop"
        reason = "length" if turn.cut and stop is None else calls
        before = self._points[call.keys[-1]].size
        ended = self.keep is None and not turn.cut and kept > 0
        last = int(turn.ids[-1]) if ended else None
        key = _digest(call.keys[-1], _compared(normalised(message)))
        self._points[key] = _Point(self._length - 1, before + kept, turn=True, last=last)
        logprobs = np.zeros(len(turn.ids), np.float32) if turn.logprobs is None else turn.logprobs
        return Reply(message, reason, stop, turn.ids[:kept], logprobs[:kept], before)

    def _tokens_to(self, turn: Turn, length: int) -> int:
        """Return how many tokens of a turn its first `length` characters need."""
        decode = self.renderer.tokenizer.decode
        counts = range(1, len(turn.ids) + 1)
        # Half of a character is decoded as another one, so that texts are compared.
        return counts[
            bisect.bisect_left(
                counts,
                True,
                key=lambda count: decode(turn.ids[:count]).startswith(turn.text[:length]),
            )
        ]


def keys_of(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Return a digest of the tools, and of them and the messages up to each one.

    Raises DataError for a message that is none.
    """
    keys = [_digest(b"", list(tools))]
    for message in messages:
        keys.append(_digest(keys[-1], _compared(normalised(message))))
    return keys


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _compared(message: Message) -> tuple[Any, ...]:
    """Return what must be equal for two messages to be one; ids of calls are the client's."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message.get("name"), message["content"], calls
