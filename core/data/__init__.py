"""Data: rows of a source become tokenised examples, drawn in an order that a checkpoint can resume."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from typing import Any

import attrs
import numpy as np

from hybridflow.core.data.rows import RenderedRow, Rows, template_problems
from hybridflow.core.data.tokenizer import Tokenizer
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.names import did_you_mean

CACHED_EXAMPLES = 200_000
"""Examples kept in memory after they were tokenised once; further ones are tokenised on every access."""


@attrs.frozen
class DataConfig:
    """Which rows, and how a row becomes a prompt, and for supervised training a response."""

    source: str = "jsonl"
    """A plugin of kind data_source ("jsonl", "parquet", "datasets", "arithmetic"), or "package.module:Class"."""
    path: str | None = None
    """The source's file or folder."""
    prompt: str = "{prompt}"
    """Format template over a row's fields, for example "Question: {question}\\nAnswer:"."""
    response: str | None = None
    """Format template of the target text (sft); an eos token is put after it."""
    rejected: str | None = None
    """Format template of a worse response than the row's (preferences). Each row then gives two sequences, the better
    one first: neighbours with one number in column `pair`, and true and false in `preferred`."""
    unsafe: tuple[str, ...] = ()
    """Two fields with true or false: whether the response, and the rejected one, is unsafe (cost models); column `unsafe`."""
    answer: str | None = None
    """Format template of the expected answer, which rewards find as meta["answer"]; without it a row's own field
    `answer`, if it has one, is what they find."""
    messages: str | None = None
    """Field with a chat (a list of {"role", "content"}), put through the tokenizer's chat template instead of `prompt`.
    If its last message is the assistant's, that is the response."""
    bos: bool = False
    """Put the tokenizer's bos token before each prompt (a chat template does that by itself)."""
    pattern: str | None = None
    """Regex with named groups: each match in `pattern_field` is a row of its own, the groups being fields beside those
    of the row that it was found in."""
    pattern_field: str | None = None
    """Field that `pattern` searches."""
    max_prompt_tokens: int = 1024
    """Length limit of a prompt, in tokens, bos included; 0 is no limit."""
    overlong: str = "error"
    """What happens to a row with a longer prompt: "error", or "drop" (left out and counted)."""
    limit: int = 0
    """Rows at most, after `pattern` and `overlong`: the first ones; 0 is all."""
    shuffle: bool = True
    """A new random order in each epoch; otherwise the source's order."""
    seed: int = 0
    """Seed of the order."""
    options: dict[str, Any] = attrs.field(factory=dict)
    """The source's own options."""

    def problems(self) -> list[str]:
        """What is wrong with this configuration, each with what to do."""
        found = []
        for name in ("prompt", "response", "rejected", "answer"):
            if (template := getattr(self, name)) is not None:
                found += template_problems(name, template)
        if self.rejected is not None and self.response is None and self.messages is None:
            found.append("data.rejected is the worse of two responses; give the better one too, data.response")
        if self.unsafe and (len(self.unsafe) != 2 or self.rejected is None):
            found.append(
                "data.unsafe names two fields, one of the response and one of the rejected one (data.rejected); got "
                f"{list(self.unsafe)}"
            )
        if self.messages is not None and self.prompt != "{prompt}":
            found.append("data.messages and data.prompt are both given; keep one of them")
        if self.messages is not None and self.bos:
            found.append("data.bos = true with data.messages would give two bos tokens; leave it to the chat template")
        if (self.pattern is None) != (self.pattern_field is None):
            found.append("data.pattern (a regex) and data.pattern_field (the field it searches) go together; give both")
        if self.pattern is not None:
            try:
                if not re.compile(self.pattern).groupindex:
                    found.append(f"data.pattern {self.pattern!r} has no named group; write one as (?P<name>...)")
            except re.error as error:
                found.append(f"data.pattern {self.pattern!r} is not a regular expression: {error}")
        if self.overlong not in ("error", "drop"):
            found.append(f'data.overlong is {self.overlong!r}; it must be "error" or "drop"')
        for name in ("max_prompt_tokens", "limit", "seed"):
            if getattr(self, name) < 0:
                found.append(f"data.{name} is {getattr(self, name)}; it cannot be negative")
        return found


class DataSource(ABC):
    """Plugin contract: a finite sequence of rows. Rows are dicts of JSON-like fields; row i is the same on every access
    and in every process. Raise DataError with what is wrong and what to do."""

    def __init__(self, config: DataConfig):
        self.config = config

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def __getitem__(self, i: int) -> dict[str, Any]:
        """Row i, 0 <= i < len."""

    def read_options(self, **defaults: Any) -> dict[str, Any]:
        """data.options over these defaults. Raises ConfigError for unknown names and for values of another type."""
        source, problems = self.config.source, []
        for name, value in self.config.options.items():
            if name not in defaults:
                hint = did_you_mean(name, defaults) + f" (options: {', '.join(defaults) or 'none'})"
                problems.append(f"data.options: source {source!r} has no option {name!r}{hint}")
            elif (default := defaults[name]) is not None and type(value) is not type(default):
                kind = type(default).__name__
                problems.append(
                    f"data.options.{name} of source {source!r} must be {kind}, for example {default!r}; got {value!r}"
                )
        if problems:
            raise ConfigError(problems)
        return {**defaults, **self.config.options}


def load_source(config: DataConfig) -> DataSource:
    """The source that data.source names. Raises PluginError, ConfigError (its options) or DataError (its data)."""
    from hybridflow.core.plugins import registry

    found = registry().get("data_source", config.source)
    if not (inspect.isclass(found) and issubclass(found, DataSource)):
        raise ConfigError(
            f"data.source {config.source!r} is {found!r}; it must be a class derived from "
            "hybridflow.core.data.DataSource"
        )
    return found(config)


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
            raise ConfigError("data.bos = true, but the tokenizer has no bos token; set data.bos = false")
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
        source = f"data source {self.config.source!r}" + (f" ({self.config.path})" if self.config.path else "")
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
            raise DataError(f"row {i} has an empty prompt; fix data.prompt or the row, or set data.bos = true")
        example = Example(prompt, response, row.meta, rejected, row.unsafe)
        if len(self._cache) < CACHED_EXAMPLES:
            self._cache[i] = example
        return example

    def _response_ids(self, text: str | None) -> np.ndarray | None:
        return None if text is None else np.append(self.tokenizer.encode(text), self.tokenizer.eos_id)

    def _prompt_ids(self, row: RenderedRow) -> np.ndarray:
        if row.messages is not None:
            return self.tokenizer.apply_chat_template(row.messages)
        ids = self.tokenizer.encode(row.prompt or "")
        return np.concatenate([[self.tokenizer.bos_id], ids]) if self.config.bos else ids


class Sampler:
    """An endless stream of row indices: a permutation of all rows in each epoch, drawn from (seed, epoch) alone, so
    that two numbers resume it bit for bit."""

    def __init__(self, n_rows: int, seed: int = 0, shuffle: bool = True):
        if n_rows < 1:
            raise DataError(f"there is nothing to draw from: the data has {n_rows} rows")
        self.n_rows, self.seed, self.shuffle = n_rows, seed, shuffle
        self.epoch = self.position = 0
        self._order = self._permutation()

    def take(self, n: int) -> np.ndarray:
        """int64 [n]: the next rows, across as many epochs as needed."""
        parts, missing = [], n
        while missing > 0:
            part = self._order[self.position : self.position + missing]
            parts.append(part)
            missing -= len(part)
            self.position += len(part)
            if self.position == self.n_rows:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is (epoch, position), and what it is a stream of."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError when that was another stream."""
        if changed := [name for name, value in self._identity().items() if state[name] != value]:
            got = ", ".join(f"{name} was {state[name]!r} and is {getattr(self, name)!r}" for name in changed)
            raise DataError(
                f"the checkpoint was at row {state['position']} of epoch {state['epoch']} of other data: {got}; "
                "restore the data's settings and files, or start a new run"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _identity(self) -> dict[str, Any]:
        return {"n_rows": self.n_rows, "seed": self.seed, "shuffle": self.shuffle}

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_rows, dtype=np.int64)
        return np.random.Generator(np.random.Philox(key=[self.seed, self.epoch])).permutation(self.n_rows)
