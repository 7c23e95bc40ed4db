"""A conversation with a model: texts in, pieces of its answers out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.rollout import Request, RolloutEngine, SamplingParams
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.data.rows import render, template_fields
from hybridflow.core.errors import DataError


@attrs.define
class Talk:
    """The messages so far, and the engine that answers.

    Without a chat template each question is a prompt by itself, by the data's template where that
    has one field.
    """

    engine: RolloutEngine
    tokenizer: Tokenizer
    sampling: SamplingParams
    """Sampling parameters, among them the stop tokens of an answer."""
    data: DataConfig
    plain: bool
    """Whether questions are prompts, without a chat template."""
    room: int
    """The largest number of tokens of a prompt with its answer."""
    system: str | None = None
    """The system message; None: there is none."""
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    _number: int = 0
    """The number of answers, which seeds their draws."""

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages = []

    def prompt_ids(self, question: str) -> np.ndarray:
        """Return the tokens of the conversation with a further question, int64 [P]."""
        if self.plain:
            return text_ids(question, self.tokenizer, self.data)
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        chat = [*first, *self.messages, {"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(chat, (), self.data.chat_template_kwargs)

    def answer(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece, or at once if the engine has no partial responses.

        Question and answer are remembered. Raises DataError for a question that the tokenizer
        cannot encode, or that leaves no room for an answer.
        """
        prompt = self.prompt_ids(question)
        if len(prompt) == 0:
            raise DataError("the question is empty")
        limit = min(self.sampling.max_tokens, self.room - len(prompt))
        if limit < 1:
            raise DataError(
                f"the conversation has {len(prompt)} tokens, and there is room for {self.room}: "
                "/reset begins anew"
            )
        self._number += 1
        sampling = attrs.evolve(self.sampling, max_tokens=limit)
        self.engine.disown()
        self.engine.add(Request(self._number, prompt, sampling, seed=self._number))

        said = ""
        while True:
            done = self.engine.step()
            ids = done[0].response_ids if done else self.engine.partial(self._number)
            if ids is not None:
                text = self.tokenizer.decode(ids)
                # A character of several tokens is yielded when it is complete.
                ready = text if done else text.rstrip("\ufffd")
                # Some tokenizers decode a prefix differently later; yielded text is kept.
                if len(ready) > len(said):
                    yield ready[len(said) :]
                    said = ready
            if done:
                break
        if not self.plain:
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": text})


def text_ids(question: str, tokenizer: Tokenizer, data: DataConfig) -> np.ndarray:
    """Return the tokens of a question in the data's template, where that has one field.

    Raises DataError for a text that the tokenizer cannot encode.
    """
    text = question
    fields = template_fields(data.prompt)
    if len(set(fields)) == 1:
        # A template that indexes into its field cannot be filled by a text; it is not used.
        with suppress(DataError):
            text = render(data.prompt, {fields[0]: question}, "prompt", 0)
    bos = [tokenizer.bos_id] if data.bos else []
    return np.concatenate([np.array(bos, np.int64), tokenizer.encode(text)])


def has_template(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer has a chat template."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}])
    except DataError:
        return False
    return True
