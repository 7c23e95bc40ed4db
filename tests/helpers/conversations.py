"""A model whose turns a test writes, behind an agent's conversation."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from helpers.templates import family
from hybridflow.backends.agents.conversation import Conversation
from hybridflow.backends.agents.rendering import ChatRenderer
from hybridflow.core.contracts.environment import Answer, Turn

TOKENIZER = family("qwen2.5")
END = int(TOKENIZER.encode("<|im_end|>")[0])
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


class ScriptedModel:
    """Keeps what it is asked, and the row as an episode would have it."""

    def __init__(self, *script: str):
        """script: turns to come; more are the test's `answers`."""
        self.script = list(script)
        self.asked: list[Answer] = []
        self.futures: list[Future] = []
        self.row: list[int] = []
        self.conversation = Conversation(ChatRenderer(TOKENIZER), "hermes", self._ask)

    def _ask(self, answer: Answer) -> Future:
        self.asked.append(answer)
        self.futures.append(Future())
        if answer.keep is not None:
            del self.row[len(self.row) - self.made + answer.keep :]
        self.row += answer.ids
        if self.script:
            self.answers(self.script.pop(0))
        return self.futures[-1]

    def chat(self, *messages, **more) -> Future:
        return self.conversation.chat(messages, **more)

    def answers(self, text: str, cut: bool = False) -> Turn:
        ids = np.array([*TOKENIZER.encode(text), *([] if cut else [END])])
        self.made = len(ids)
        self.row += ids.tolist()
        turn = Turn(0, text, ids, not cut, cut, np.full(len(ids), -0.5, np.float32))
        self.futures[-1].set_result(turn)
        return turn

    def texts(self) -> list[str]:
        """What stood before each of its turns, special tokens included."""
        return [TOKENIZER.decode(one.ids, skip_special=False) for one in self.asked]
