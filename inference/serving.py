"""Serves one engine to the conversations of clients, by the endpoint that agents are trained with.

client -> Endpoint -> Desk: the conversation that the messages go on from
                        -> Conversation -> Row: its tokens -> Request
engine's loop, the main thread: requests in, turns out
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.environment import Answer, Turn
from hybridflow.core.contracts.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.branches import Place
from hybridflow.kit.chat.conversation import AgentError, Conversation, Reply, keys_of
from hybridflow.kit.chat.rendering import Renderer

CONVERSATIONS = 1000
"""The most that are held; those that were not used for longest are forgotten, and begin anew."""
LONGEST = 64
"""How many times the room of a conversation a tree of them may have in tokens."""
IDLE_S = 0.5
"""Seconds between two looks at whether the server is to end."""


class Row:
    """The tokens of one conversation and its branches."""

    def __init__(self) -> None:
        self.prompt = np.zeros(0, np.int64)
        self.ids = np.zeros(0, np.int64)
        self.place = Place()
        self.turn = 0
        """Number of tokens of the last turn."""

    def asked(self, answer: Answer) -> tuple[np.ndarray, np.ndarray]:
        """Take an answer's tokens; return the prompt, and what stands between it and the turn."""
        if answer.keep is not None:
            self.ids = self.ids[: len(self.ids) - self.turn + answer.keep]
            self.turn = answer.keep  # told again where the question is refused
        if not len(self.prompt):
            self.prompt = np.array(answer.ids, np.int64)
        else:
            self.place.move(len(self.ids), len(answer.ids), answer.after)
            self.ids = np.concatenate([self.ids, np.array(answer.ids, np.int64)])
        prompt, context = self.place.split(self.prompt, self.ids)
        return prompt, self.ids[context]

    def took(self, turn: np.ndarray) -> None:
        """Take a turn of the model."""
        self.turn = len(turn)
        self.ids = np.concatenate([self.ids, turn])


@attrs.frozen(eq=False)
class _Question:
    """A request of a conversation, and the turn that is waited for."""

    request: Request
    begins: int
    """Where the turn begins, behind the tokens of the prefix."""
    row: Row
    turn: Future[Turn]


@attrs.define(eq=False)
class Desk:
    """All conversations of a server, each of which has its calls answered one after the other."""

    engine: RolloutEngine
    tokenizer: Tokenizer
    renderer: Renderer
    sampling: SamplingParams
    room: int
    """The largest number of tokens of a conversation with its answer."""
    tools: str = "hermes"
    """The form of the model's calls of tools (kit/chat/parsing.py)."""
    answered: int = 0
    """Number of turns of the model."""
    _conversations: deque[tuple[Conversation, Row]] = attrs.field(factory=deque)
    """Those used last come last."""
    _asked: SimpleQueue[_Question] = attrs.field(factory=SimpleQueue)
    _number: int = 0

    def several(
        self,
        count: int,
        messages: Sequence[Any],
        tools: Sequence[Any] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Future[Reply]]:
        """Have the model answer, in the conversation that the messages go on from, or a new one.

        Called by the endpoint's thread alone. Raises AgentError, DataError.
        """
        keys = keys_of(messages, tools)
        every = reversed(self._conversations)
        found = next((one for one in every if one[0].goes_on(keys)), None)
        if found is not None:
            self._conversations.remove(found)
        # A row with branches without end would be copied for each turn.
        if found is None or len(found[1].ids) > LONGEST * self.room:
            row = Row()
            found = Conversation(self.renderer, self.tools, partial(self._ask, row)), row
        if len(self._conversations) == CONVERSATIONS:
            self._conversations.popleft()
        self._conversations.append(found)
        return found[0].several(count, messages, tools, max_tokens, stop)

    def _ask(self, row: Row, answer: Answer) -> Future[Turn]:
        prompt, prefix = row.asked(answer)
        left = self.room - len(prompt) - len(prefix)
        if left < 1:
            raise AgentError(
                f"the conversation has {len(prompt) + len(prefix)} tokens, and there is room for "
                f"{self.room}, its answer among them (data.max_prompt_tokens + sampling.max_tokens)"
            )
        last = [*prompt, *prefix][-1:]
        if not last or last[0] in self.sampling.stop_token_ids:
            raise AgentError("there is nothing to answer: the messages are empty")
        limit = min(left, self.sampling.max_tokens, answer.max_tokens or left)
        self._number += 1
        request = Request(
            self._number,
            prompt,
            attrs.evolve(self.sampling, max_tokens=len(prefix) + limit),
            seed=self._number,
            prefix_ids=prefix,
            prefix_logprobs=np.zeros(len(prefix), np.float32),
            prefix_versions=np.zeros(len(prefix), np.int64),
        )
        turn: Future[Turn] = Future()
        turn.set_running_or_notify_cancel()
        self._asked.put(_Question(request, len(prefix), row, turn))
        self.engine.nudge()
        return turn

    def _made(self, asked: _Question, done: Completion) -> None:
        start = asked.begins
        ids = done.response_ids[start:]
        asked.row.took(ids)
        self.answered += 1
        text, cut = self.tokenizer.decode(ids), done.finish_reason == "length"
        asked.turn.set_result(Turn(0, text, ids, not cut, cut, done.logprobs[start:]))

    def serve(self, ended: Callable[[], bool]) -> None:
        """Run the engine until `ended`."""
        running: dict[int, _Question] = {}
        while not ended():
            wait = not running
            try:
                while True:
                    asked = self._asked.get(wait, IDLE_S)
                    try:
                        self.engine.add(asked.request)
                    except HybridFlowError as error:  # one client's request is no other's affair
                        asked.turn.set_exception(AgentError(f"the engine refuses it: {error}"))
                        continue
                    running[asked.request.id] = asked
                    wait = False
            except Empty:
                pass
            for done in self.engine.step() if running else ():
                self._made(running.pop(done.id), done)
