"""Rows of a source become tokenised examples."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from hybridflow.core.contracts.data_source import DataConfig, DataSource
from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.data.rows import RenderedRow, Rows
from hybridflow.core.errors import ConfigError, DataError

CACHED_EXAMPLES = 200_000
"""Examples kept in memory after they were tokenised once; further ones are tokenised on every access."""


@attrs.frozen(eq=False)
class Example:
    """One tokenised row."""

    prompt_ids: np.ndarray
    """int64 [P], P >= 1."""
    response_ids: np.ndarray | None
    """int64 [T], ending with eos; None without data.response."""
    meta: dict[str, Any]
    """The row's fields, and `answer` where data.answer is set."""
    rejected_ids: np.ndarray | None = None
    """Likewise, of data.rejected."""
    unsafe: tuple[bool, ...] = ()
    """Of both, where data.unsafe is set."""


class ExampleSet:
    """The tokenised rows of a source. A row is tokenised when it is first asked for (with overlong = "drop": all of
    them at the first `len`)."""

    def __init__(self, source: DataSource, config: DataConfig, tokenizer: Tokenizer):
        self.rows, self.config, self.tokenizer = Rows(source, config), config, tokenizer
        if config.bos and tokenizer.bos_id is None:
            raise ConfigError(
                "data.bos = true, but the tokenizer has no bos token; set data.bos = false"
            )
        self._cache: dict[int, Example] = {}
        self._kept: list[int] | None = None
        self._dropped = 0

    def __len__(self) -> int:
        if self.config.overlong == "drop" and self.config.max_prompt_tokens:
            return len(self._keep())
        return min(len(self.rows), self.config.limit or len(self.rows))

    @property
    def dropped(self) -> int:
        """Rows left out because their prompt is too long (counted up to the row that fills `limit`)."""
        len(self)
        return self._dropped

    def __getitem__(self, i: int) -> Example:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        row = i if self._kept is None else self._kept[i]
        example = self._tokenise(row)
        length, most = len(example.prompt_ids), self.config.max_prompt_tokens
        if most and length > most:
            raise DataError(
                f"row {row}: the prompt has {length} tokens, more than data.max_prompt_tokens = {most}; raise it, or "
                'set data.overlong = "drop" to leave such rows out'
            )
        return example

    def check(self, limit: int = 10_000) -> None:
        """Tokenise the first `limit` examples and raise the DataError that the run would meet later."""
        source = f"data source {self.config.source!r}" + (
            f" ({self.config.path})" if self.config.path else ""
        )
        if len(self.rows) == 0:
            raise DataError(f"{source} has no rows; check data.path and data.options")
        if len(self) == 0:
            raise DataError(
                f"all {self._dropped} rows of {source} have prompts of more than data.max_prompt_tokens = "
                f"{self.config.max_prompt_tokens} tokens and were dropped; raise it"
            )
        for i in range(min(len(self), limit)):
            self[i]

    def _keep(self) -> list[int]:
        if self._kept is None:
            kept: list[int] = []
            dropped = 0
            for row in range(len(self.rows)):
                if self.config.limit and len(kept) == self.config.limit:
                    break
                if len(self._tokenise(row).prompt_ids) > self.config.max_prompt_tokens:
                    self._cache.pop(row, None)
                    dropped += 1
                else:
                    kept.append(row)
            self._kept, self._dropped = kept, dropped
        return self._kept

    def _tokenise(self, i: int) -> Example:
        if (example := self._cache.get(i)) is not None:
            return example
        row = self.rows[i]
        try:
            prompt = self._prompt_ids(row)
            response, rejected = self._response_ids(row.response), self._response_ids(row.rejected)
        except DataError as error:
            raise DataError(f"row {i}: {error}") from error
        if rejected is not None and response is None:
            raise DataError(
                f"row {i} has a rejected response and no better one; its messages must end with the assistant's"
            )
        if len(prompt) == 0:
            raise DataError(
                f"row {i} has an empty prompt; fix data.prompt or the row, or set data.bos = true"
            )
        example = Example(prompt, response, row.meta, rejected, row.unsafe)
        if len(self._cache) < CACHED_EXAMPLES:
            self._cache[i] = example
        return example

    def _response_ids(self, text: str | None) -> np.ndarray | None:
        return (
            None if text is None else np.append(self.tokenizer.encode(text), self.tokenizer.eos_id)
        )

    def _prompt_ids(self, row: RenderedRow) -> np.ndarray:
        if row.messages is not None:
            return self.tokenizer.apply_chat_template(row.messages)
        ids = self.tokenizer.encode(row.prompt or "")
        return np.concatenate([[self.tokenizer.bos_id], ids]) if self.config.bos else ids
