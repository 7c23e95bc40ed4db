"""One episode's messages and tokens, as an agent makes them by asking the model.

A call whose messages begin with those held, the model's own turns among them, goes on after the
tokens held. Only what the agent has added becomes tokens.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import numpy as np

from hybridflow.backends.agents.parsing import message_of
from hybridflow.backends.agents.rendering import Message, Renderer, normalised
from hybridflow.core.contracts.environment import Answer, Turn
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.text import shorten


class AgentError(HybridFlowError):
    """An agent asked the model for what cannot be; told to the agent, not to the run."""


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


Ask = Callable[[Answer], "Future[Turn]"]
"""The tokens to go on after, and the turn's limit -> the model's turn."""


class Conversation:
    """The messages and tokens of one episode. One call at a time, from any thread."""

    def __init__(self, renderer: Renderer, tools: str, ask: Ask):
        """tools: the format of the model's calls (parsing.py)."""
        self.renderer = renderer
        self.format = tools
        self.ask = ask
        self.messages: list[dict[str, Any]] = []
        """Normalised, the model's turns among them."""
        self.tools: list[Any] = []
        self.turns = 0
        self.keep: int | None = None
        """Number of tokens of the model's last turn that stay; None: all."""
        self._length = 0
        """Number of tokens so far."""
        self._last: int | None = None
        """The token that ended the model's last turn; None where its limit did."""
        self._waits = False
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

        Raises AgentError where the messages do not go on from those held, DataError where they
        cannot be rendered; the conversation is then as before.
        """
        sent = [normalised(message) for message in messages]
        if not all(stop):
            raise AgentError("a stop is empty; give texts")
        if max_tokens is not None and max_tokens < 1:
            raise AgentError(f"max_tokens is {max_tokens}; ask for at least one token")
        with self._lock:
            if self._waits:
                raise AgentError(
                    "the model is asked again before it has answered; an episode is one "
                    "conversation, with one call at a time"
                )
            ids = self._rendered(sent, list(tools))
            self._waits = True
            self._length += len(ids)
            asked = Answer(ids=tuple(ids), max_tokens=max_tokens, keep=self.keep)
        reply: Future[Reply] = Future()
        # An agent may cease to wait; the turn comes all the same.
        reply.set_running_or_notify_cancel()

        def answered(done: Future[Turn]) -> None:
            try:
                reply.set_result(self._took(sent, list(tools), stop, done.result()))
            except BaseException as error:
                reply.set_exception(error)

        try:
            self.ask(asked).add_done_callback(answered)
        except BaseException:
            self._waits = False
            self._length -= len(ids)
            raise
        return reply

    def _rendered(self, sent: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        """Return the tokens to go on after. Raises AgentError, DataError."""
        if not self.turns:
            if not sent:
                raise AgentError("the model is asked with no message; send one at least")
            return self.renderer.begin(sent, tools)
        held = self.messages
        for number, message in enumerate(held):
            if number >= len(sent) or _compared(sent[number]) != _compared(message):
                got = "nothing" if number >= len(sent) else shorten(str(sent[number]))
                raise AgentError(
                    f"message {number} was {shorten(str(message))} and is now {got}; an episode is "
                    "one conversation, and each call has all messages of the one before, the "
                    "model's answer, and new ones"
                )
        if tools != self.tools:
            raise AgentError(
                "the tools differ from those of the call before; they stand at the beginning of "
                "the conversation, which cannot change"
            )
        new = sent[len(held) :]
        if not new:
            raise AgentError("there is no message after the model's answer; send one")
        return self.renderer.follow(self._last, new, tools)

    def _took(
        self, sent: list[dict[str, Any]], tools: list[Any], stops: Sequence[str], turn: Turn
    ) -> Reply:
        """Hold a turn of the model; return it."""
        found = [(at, stop) for stop in stops if (at := turn.text.find(stop)) >= 0]
        at, stop = min(found, default=(len(turn.text), None))
        kept = len(turn.ids)
        if stop is not None:
            kept = self._tokens_to(turn, at + len(stop))
        message = message_of(turn.text[:at], self.format, self.turns)
        calls = "tool_calls" if message.get("tool_calls") else "stop"
        reason = "length" if turn.cut and stop is None else calls
        with self._lock:
            before = self._length
            self._length += kept
            self.messages = [*sent, normalised(message)]
            self.tools = tools
            self.turns += 1
            self.keep = None if kept == len(turn.ids) else kept
            ended = not turn.cut and self.keep is None
            self._last = int(turn.ids[-1]) if ended else None
            self._waits = False
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


def _compared(message: Message) -> tuple[Any, ...]:
    """Return what must be equal for two messages to be one; ids of calls are the client's."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message["content"], calls
