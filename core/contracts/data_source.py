"""The contract of data sources, which are finite sequences of rows, and the settings of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import attrs

from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean
from hybridflow.core.validators import non_negative


@attrs.frozen
class DataConfig:
    """Settings of the rows that a run draws, and of how a row becomes a prompt and a response."""

    # Where rows come from
    source: str = "jsonl"
    """A plugin of kind data_source ("jsonl", "parquet", "datasets", "arithmetic"), or
    "package.module:Class"."""
    path: str | None = None
    """File or folder of the source."""

    # The texts of a row
    prompt: str = "{prompt}"
    """Format template over a row's fields, for example "Question: {question}\\nAnswer:"; dots reach
    into tables: "{extra_info.question}". If it is one field with a chat (a list of {"role",
    "content"}), that goes through the tokenizer's chat template."""
    response: str | None = None
    """Format template of the target text (sft); an eos token is put after it. Or one field with the
    messages of a chat that follow the prompt's, as "{completion}" and "{chosen}" of TRL's data."""
    rejected: str | None = None
    """Format template of a worse response than the row's (preferences), or a chat likewise. Each
    row then gives two sequences, the better one first: neighbours with one number in column `pair`,
    and true and false in `preferred`."""
    unsafe: tuple[str, ...] = ()
    """Two fields with true or false: whether the response, and the rejected one, is unsafe (cost
    models); column `unsafe`."""
    answer: str | None = None
    """Format template of the expected answer, which rewards get as meta["answer"], for example
    "{reward_model.ground_truth}"; without it they get the row's own field `answer`, if it has
    one."""
    messages: str | None = None
    """Field with a chat (a list of {"role", "content"}), put through the tokenizer's chat template
    instead of `prompt`. If its last message is the assistant's, that is the response."""
    chat_template_kwargs: dict[str, Any] = attrs.field(factory=dict)
    """Further values for the chat template, such as { enable_thinking = false }. A row's own
    fields `chat_template_kwargs` and `tools` go to the template too."""
    bos: bool = False
    """Whether to put the tokenizer's bos token before prompts (chat templates add their own)."""
    pattern: str | None = None
    """Regex with named groups: each match in `pattern_field` becomes a row of its own. The groups
    are fields of it, beside those of the row that contains the match."""
    pattern_field: str | None = None
    """Field that `pattern` searches."""

    # Which rows count, and in which order
    max_prompt_tokens: int = attrs.field(default=1024, validator=non_negative)
    """Length limit of a prompt, in tokens, bos included; 0 is no limit."""
    overlong: Literal["error", "drop"] = "error"
    """What happens to a row with a longer prompt: "error", or "drop" (left out and counted)."""
    limit: int = attrs.field(default=0, validator=non_negative)
    """Use only this many rows: the first ones, after `pattern` and `overlong`; 0 is all."""
    shuffle: bool = True
    """Whether each epoch has a new random order; otherwise rows come in the source's order."""
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(non_negative))
    """Seed of the order; by default `run.seed`."""

    # Settings of this source alone
    options: dict[str, Any] = attrs.field(factory=dict)
    """The source's own options."""


class DataSource(ABC):
    """The plugin contract: a finite sequence of rows.

    Rows are dicts of JSON-like fields; row i is the same on every access and in every process.
    Raise DataError with the problem and its remedy.
    """

    def __init__(self, config: DataConfig):
        self.config = config

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return row i, 0 <= i < len."""

    def read_options(self, **defaults: Any) -> dict[str, Any]:
        """Return data.options over these defaults.

        Raises ConfigError for unknown names, and for values of another type than the default's.
        """
        # A default of None takes a value of any type.
        source = self.config.source
        problems = []
        for name, value in self.config.options.items():
            if name not in defaults:
                hint = did_you_mean(name, defaults) + f" (options: {', '.join(defaults) or 'none'})"
                problems.append(f"data.options: source {source!r} has no option {name!r}{hint}")
            elif (default := defaults[name]) is not None and type(value) is not type(default):
                kind = type(default).__name__
                problems.append(
                    f"data.options.{name} of source {source!r} must be {kind}, "
                    f"for example {default!r}; got {value!r}"
                )

        if problems:
            raise ConfigError(problems)
        return {**defaults, **self.config.options}
