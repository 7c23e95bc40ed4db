"""A model whose turns a test writes, behind an agent's conversation."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from helpers.templates import family
from hybridflow.core.contracts.environment import Answer, Turn
from hybridflow.kit.chat.conversation import Conversation
from hybridflow.kit.chat.rendering import ChatRenderer

TOKENIZER = family("qwen2.5")
END = int(TOKENIZER.encode("<|im_end|>")[0])
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


class ScriptedModel:
    """Keeps what it is asked, and what stood before each of its turns."""

    def __init__(self, *script: str, tokenizer=TOKENIZER, end: int = END, tools: str = "hermes"):
        """script: turns to come; more are the test's `answers`."""
        self.script = list(script)
        self.tokenizer, self.end = tokenizer, end
        self.asked: list[Answer] = []
        self.futures: list[Future] = []
        self.conversation = Conversation(ChatRenderer(tokenizer), tools, self._ask)
        self.contexts: list[list[int]] = []
        """All tokens before each turn."""
        self.turns: list[list[int]] = []
        """The tokens of each turn that stay."""
        self.row: list[int] = []
        """The row's tokens, in the order in which they were written; its prompt is not among them."""
        self._upto: dict[int, list[int]] = {}
        """For each token of the row, -1 for its prompt and -2 for none, all tokens up to it: by brute force."""

    def _ask(self, answer: Answer) -> Future:
        first = not self.asked
        self.asked.append(answer)
        self.futures.append(Future())
        if answer.keep is not None:
            gone = len(self.turns[-1]) - answer.keep
            self.row, self.turns[-1] = (
                self.row[: len(self.row) - gone],
                self.turns[-1][: answer.keep],
            )
        after = len(self.row) - 1 if answer.after is None else answer.after
        if first:
            self._upto = {-2: [], -1: list(answer.ids)}
            self.contexts.append(list(answer.ids))
        else:
            self.contexts.append(self._put(after, answer.ids))
        if self.script:
            self.answers(self.script.pop(0))
        return self.futures[-1]

    def _put(self, after: int, ids) -> list[int]:
        upto = self._upto[after]
        for token in ids:
            upto = [*upto, int(token)]
            self._upto[len(self.row)] = upto
            self.row.append(int(token))
        return upto

    def chat(self, *messages, **more) -> Future:
        return self.conversation.chat(messages, **more)

    def answers(self, text: str, cut: bool = False) -> Turn:
        ids = np.array([*self.tokenizer.encode(text), *([] if cut else [self.end])])
        self.turns.append(ids.tolist())
        # Behind its context, which may end elsewhere than the row.
        upto = self.contexts[-1]
        for token in ids.tolist():
            upto = [*upto, token]
            self._upto[len(self.row)] = upto
            self.row.append(token)
        turn = Turn(0, text, ids, not cut, cut, np.full(len(ids), -0.5, np.float32))
        self.futures[-1].set_result(turn)
        return turn

    def texts(self) -> list[str]:
        """What it was sent before each of its turns, special tokens included."""
        return [self.tokenizer.decode(one.ids, skip_special=False) for one in self.asked]
