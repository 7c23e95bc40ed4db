"""Rows of a source become tokenised examples.

DataSource  --Rows-->  RenderedRow (texts)  --ExampleSet-->  Example (token ids)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.data.chats import Message, messages_of
from hybridflow.core.data.rows import RenderedRow, Rows
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.values.text import shorten

CACHED_EXAMPLES = 200_000
"""Number of examples kept in memory once tokenised; further ones are tokenised on every access."""


CHECKED = 10_000
"""Rows that are looked at before a run starts."""


@attrs.frozen(eq=False)
class Example:
    """One tokenised row."""

    prompt_ids: np.ndarray
    """Tokens of the prompt, int64 [P], P >= 1."""
    response_ids: np.ndarray | None
    """Tokens of the response, int64 [T], ending with eos; None if the data has no responses."""
    meta: dict[str, Any]
    """The row's fields, and `answer` where data.answer is set."""
    rejected_ids: np.ndarray | None = None
    """Tokens of the rejected response, int64, ending with eos; None without data.rejected."""
    unsafe: tuple[bool, ...] = ()
    """Whether the response and the rejected one are unsafe, where data.unsafe is set."""


class ExampleSet:
    """The tokenised rows of a source.

    A row is tokenised when it is first asked for; with overlong = "drop" the first `len` tokenises
    all rows.
    """

    def __init__(self, source: DataSource, config: DataConfig, tokenizer: Tokenizer):
        self.rows = Rows(source, config)
        self.config = config
        self.tokenizer = tokenizer
        if config.bos and tokenizer.bos_id is None:
            raise ConfigError(
                "data.bos = true, but the tokenizer has no bos token; set data.bos = false"
            )

        self._cache: dict[int, Example] = {}  # by row of the source
        self._kept: list[int] | None = None  # rows with short prompts, under overlong = "drop"
        self._dropped = 0

    def __len__(self) -> int:
        if self.config.overlong == "drop" and self.config.max_prompt_tokens:
            return len(self._keep())
        return min(len(self.rows), self.config.limit or len(self.rows))

    @property
    def dropped(self) -> int:
        """Rows left out because their prompt is too long (counted up to the row that fills
        `limit`)."""
        len(self)
        return self._dropped

    def __getitem__(self, i: int) -> Example:
        """Return example `i`.

        Raises IndexError, and DataError for a row that cannot be used, with the row's number.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        row = self._row(i)
        example = self._tokenise(row)

        length = len(example.prompt_ids)
        limit = self.config.max_prompt_tokens
        if limit and length > limit:
            raise DataError(
                f"row {row}: the prompt has {length} tokens, more than "
                f"data.max_prompt_tokens = {limit}; raise it, or "
                'set data.overlong = "drop" to leave such rows out'
            )
        return example

    def prompt(self, text: str | Sequence[Mapping[str, Any]]) -> Example:
        """Return an example without a response of a text or a chat that is no row of the source.

        Raises DataError for one that cannot be encoded, is empty, or too long.
        """
        if isinstance(text, str):
            row = RenderedRow(text, None, None, {})
        else:
            options = self.config.chat_template_kwargs
            row = RenderedRow(None, messages_of(text), None, {}, template_kwargs=dict(options))
        ids = self._prompt_ids(row)
        limit = self.config.max_prompt_tokens
        if len(ids) == 0 or (limit and len(ids) > limit):
            raise DataError(
                f"a prompt that the algorithm has written has {len(ids)} tokens: "
                f"{shorten(str(text))}; write at least one, and at most data.max_prompt_tokens = "
                f"{limit}, or raise that"
            )
        return Example(ids, None, {})

    def check(self, positions: int | None = None, limit: int = CHECKED) -> None:
        """Tokenise the first `limit` examples, to raise the DataError that a run would raise.

        positions: the most tokens that a model reads at a time, if it has such a limit.
        """
        source = f"data source {self.config.source!r}"
        if self.config.path:
            source += f" ({self.config.path})"

        if len(self.rows) == 0:
            raise DataError(f"{source} has no rows; check data.path and data.options")
        if len(self) == 0:
            raise DataError(
                f"all {self._dropped} rows of {source} have prompts of more than "
                f"data.max_prompt_tokens = {self.config.max_prompt_tokens} tokens and were "
                "dropped; raise it"
            )

        # Access tokenises, and raises for a row that cannot be used.
        for i in range(min(len(self), limit)):
            example = self[i]
            given = [ids for ids in (example.response_ids, example.rejected_ids) if ids is not None]
            length = len(example.prompt_ids) + max(map(len, given), default=0)
            if given and positions is not None and length > positions:
                raise DataError(
                    f"row {self._row(i)}: prompt and response have {length} tokens, more than the "
                    f"model's {positions} positions (max_position_embeddings); shorten it or leave "
                    "it out"
                )

    def of_each_kind(self, most: int = 8, limit: int = CHECKED) -> dict[int, Example]:
        """Return the first example of each kind by its row's number in the source.

        Examples are of one kind if they have the same fields, without those that are null. The
        search ends with `most` kinds, or after the first `limit` examples.
        """
        found: dict[int, Example] = {}
        seen: set[frozenset[str]] = set()
        for i in range(min(len(self), limit)):
            example = self[i]
            kind = frozenset(name for name, value in example.meta.items() if value is not None)
            if kind not in seen:
                seen.add(kind)
                found[self._row(i)] = example
            if len(found) == most:
                break
        return found

    def _row(self, i: int) -> int:
        """Return the row of the source that example `i` was made of."""
        # `len` has found the rows to keep, if there are any to drop.
        return i if self._kept is None else self._kept[i]

    def _keep(self) -> list[int]:
        """Return the rows with prompts that are not too long, up to `limit` of them; cached."""
        if self._kept is None:
            kept: list[int] = []
            dropped = 0
            for row in range(len(self.rows)):
                if self.config.limit and len(kept) == self.config.limit:
                    break
                if len(self._tokenise(row).prompt_ids) > self.config.max_prompt_tokens:
                    self._cache.pop(row, None)  # it is never asked for again
                    dropped += 1
                else:
                    kept.append(row)

            self._kept = kept
            self._dropped = dropped
        return self._kept

    def _tokenise(self, i: int) -> Example:
        """Return the example of row `i` of the source, from the cache if it has it."""
        if (example := self._cache.get(i)) is not None:
            return example

        row = self.rows[i]
        try:
            prompt = self._prompt_ids(row)
            response = self._response_ids(row, prompt, row.response)
            rejected = self._response_ids(row, prompt, row.rejected)
        except DataError as error:
            raise DataError(f"row {i}: {error}") from error

        # Only a chat can lack the response: data_problems checks the templates.
        if rejected is not None and response is None:
            raise DataError(
                f"row {i} has a rejected response and no better one; its messages must end with "
                "the assistant's"
            )
        if len(prompt) == 0:
            raise DataError(
                f"row {i} has an empty prompt; fix data.prompt or the row, or set data.bos = true"
            )

        example = Example(prompt, response, row.meta, rejected, row.unsafe)
        if len(self._cache) < CACHED_EXAMPLES:
            self._cache[i] = example
        return example

    def _response_ids(
        self, row: RenderedRow, prompt: np.ndarray, response: str | list[Message] | None
    ) -> np.ndarray | None:
        """Return the tokens of a text or of messages that follow the prompt; eos is the last."""
        tokenizer = self.tokenizer
        if response is None:
            return None
        if isinstance(response, str):
            return np.append(tokenizer.encode(response), tokenizer.eos_id)

        # The template writes the whole chat, of which the prompt is the beginning.
        chat = [*(row.messages or ()), *response]
        whole = tokenizer.apply_chat_template(chat, row.tools, row.template_kwargs, complete=True)
        if not np.array_equal(whole[: len(prompt)], prompt):
            raise DataError(
                "the chat template does not write the answer after what it opens the assistant's "
                "turn with, so that the model would never be asked for it as it is trained; "
                "give the answer as a text (data.response)"
            )
        ids = whole[len(prompt) :]

        # The model should not learn to write a line break after the end token.
        ends = np.flatnonzero(ids == tokenizer.eos_id)
        return ids[: ends[-1] + 1] if len(ends) else np.append(ids, tokenizer.eos_id)

    def _prompt_ids(self, row: RenderedRow) -> np.ndarray:
        # A chat template writes its special tokens itself.
        if row.messages is not None:
            return self.tokenizer.apply_chat_template(row.messages, row.tools, row.template_kwargs)

        ids = self.tokenizer.encode(row.prompt or "")
        if self.config.bos:
            return np.concatenate([[self.tokenizer.bos_id], ids])
        return ids
