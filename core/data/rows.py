"""A source's rows as texts, by the settings of [data].

    fields of a source's row
        |  pattern: each match of a regex becomes a row of its own
    fields of a row
        |  prompt, response, rejected, answer: format templates; messages: a chat
    RenderedRow

Errors name the row and the setting.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.names import did_you_mean
from hybridflow.core.values.text import shorten

if TYPE_CHECKING:
    from hybridflow.core.contracts.data_source import DataConfig, DataSource


@attrs.frozen(eq=False)
class RenderedRow:
    """One row as texts: exactly one of `prompt` and `messages` is set."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    """A chat, without the assistant's last message if that is the response."""
    response: str | None
    meta: dict[str, Any]
    """The row's fields, and `answer` where data.answer is set."""
    rejected: str | None = None
    unsafe: tuple[bool, ...] = ()
    """Whether the response and the rejected one are unsafe, where data.unsafe is set."""

    def texts(self) -> Iterator[str]:
        """Yield every text that a tokenizer must spell, the expected answer included."""
        if self.prompt is not None:
            yield self.prompt
        for message in self.messages or ():
            yield str(message.get("content") or "")

        if self.response is not None:
            yield self.response
        if self.rejected is not None:
            yield self.rejected
        if isinstance(self.meta.get("answer"), str):
            yield self.meta["answer"]


class Rows(Sequence):
    """The rows of a source after `pattern`, rendered on access.

    Raises ConfigError for settings that do not go together, and DataError with the row and field.
    """

    def __init__(self, source: DataSource, config: DataConfig):
        if problems := data_problems(config):
            raise ConfigError(problems)
        self.source = source
        self.config = config
        self._matches = self._find_matches() if config.pattern else None

    def __len__(self) -> int:
        return len(self.source) if self._matches is None else len(self._matches)

    def __getitem__(self, i: int) -> RenderedRow:  # type: ignore[override]
        if not 0 <= i < len(self):
            raise IndexError(i)

        # A template that is not set leaves its text out.
        config = self.config
        row = self.fields(i)
        response = None if config.response is None else render(config.response, row, "response", i)
        rejected = None if config.rejected is None else render(config.rejected, row, "rejected", i)
        meta = dict(row)
        if config.answer is not None:
            meta["answer"] = render(config.answer, row, "answer", i)

        if config.messages is None:
            prompt = render(config.prompt, row, "prompt", i)
            return RenderedRow(prompt, None, response, meta, rejected, self._unsafe(row, i))

        # In a chat the assistant's last message is the response, and the rest is the prompt.
        messages = self._messages(row, i)
        if messages[-1]["role"] == "assistant":
            if response is not None:
                raise DataError(
                    f"row {i}: {config.messages!r} ends with the assistant's message, which is the "
                    "response, and data.response gives another; remove data.response"
                )
            response = str(messages.pop().get("content") or "")
        if not messages:
            raise DataError(
                f"row {i}: {config.messages!r} has no message before the assistant's, so no prompt"
            )
        return RenderedRow(None, messages, response, meta, rejected, self._unsafe(row, i))

    def fields(self, i: int) -> dict[str, Any]:
        """Return the fields of row `i`: the source's, with a pattern's named groups over them."""
        # Without a pattern, rows are the source's.
        index, groups = (i, {}) if self._matches is None else self._matches[i]
        return {**self._source_row(index), **groups}

    def texts(self) -> Iterator[str]:
        """Yield the texts of all rows, to train a tokenizer on."""
        for i in range(len(self)):
            yield from self[i].texts()

    def _source_row(self, index: int) -> Mapping[str, Any]:
        row = self.source[index]
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {index} of data source {self.config.source!r} is a {type(row).__name__}; it "
                "must be a mapping of field names to values"
            )
        return row

    def _find_matches(self) -> list[tuple[int, dict[str, str]]]:
        """Return all matches of `pattern`: (row of the source, named groups)."""
        field = self.config.pattern_field or ""
        regex = re.compile(self.config.pattern or "")
        # A row without a match gives none; a group that takes no part in its match is "".
        matches = []
        for index in range(len(self.source)):
            row = self._source_row(index)
            if field not in row:
                raise _no_field(field, row, "data.pattern_field", index)
            text = "" if row[field] is None else str(row[field])
            for match in regex.finditer(text):
                matches.append((index, match.groupdict(default="")))

        # The first row's text shows what the pattern should have matched.
        if not matches and len(self.source):
            first = str(self._source_row(0)[field])
            raise DataError(
                f"data.pattern {regex.pattern!r} matches nothing in the field {field!r} of any of "
                f"the {len(self.source)} rows (the first one is {shorten(first)}); change the "
                "pattern or the field"
            )
        return matches

    def _messages(self, row: Mapping[str, Any], i: int) -> list[dict[str, Any]]:
        """Return the chat of row `i`, checked: a list, not empty, of messages with roles."""
        name = self.config.messages or ""
        if name not in row:
            raise _no_field(name, row, "data.messages", i)

        # A string is a sequence too, and no list of messages.
        messages = row[name]
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not (
            is_list
            and len(messages) > 0
            and all(isinstance(message, Mapping) and "role" in message for message in messages)
        ):
            raise DataError(
                f"row {i}: the field {name!r} must be a list of messages such as "
                f'{{"role": "user", "content": "..."}}; got {shorten(repr(messages))}'
            )
        return [dict(message) for message in messages]

    def _unsafe(self, row: Mapping[str, Any], i: int) -> tuple[bool, ...]:
        """Return the fields of data.unsafe, checked: each is true or false."""
        for name in self.config.unsafe:
            if name not in row:
                raise _no_field(name, row, "data.unsafe", i)
            if not isinstance(row[name], bool):
                raise DataError(
                    f"row {i}: the field {name!r} of data.unsafe must be true or false, "
                    f"got {row[name]!r}"
                )
        return tuple(row[name] for name in self.config.unsafe)


class _Formatter(string.Formatter):
    """str.format that raises for a missing value instead of printing "None"."""

    def get_field(self, field_name, args, kwargs):
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise ValueError(f"the field {field_name!r} is null")
        return value, first


def render(template: str, row: Mapping[str, Any], name: str, i: int) -> str:
    """Fill a format template with the fields of row `i`.

    `name` is the template's setting: "prompt", "response", "rejected" or "answer". Raises DataError
    for a template that the row cannot fill.
    """
    try:
        return _Formatter().vformat(template, (), row)
    except Exception as error:
        # A missing field is the most frequent cause, and deserves a message of its own.
        for field in template_fields(template):
            if field not in row:
                raise _no_field(field, row, f"data.{name} = {template!r}", i) from error
        raise DataError(
            f"row {i}: data.{name} = {template!r} cannot be filled in: {error}; its fields are "
            f"{_fields(row)}"
        ) from error


def template_fields(template: str) -> list[str]:
    """Return the row fields that a format template names.

    Raises ValueError when it is no format template.
    """
    names = []
    for _, field, spec, _ in string.Formatter().parse(template):
        if field is not None:
            names.append(re.split(r"[.\[]", field, maxsplit=1)[0])
            names += template_fields(spec or "")  # a format such as {width} may name fields too
    return names


def template_problems(name: str, template: str) -> list[str]:
    """List what is wrong with a template before any row is seen."""
    try:
        fields = template_fields(template)
    except ValueError as error:
        return [
            f"data.{name} = {template!r} is not a format template: {error}; "
            "write {{ and }} for braces"
        ]
    if any(not field or field.isdigit() for field in fields):
        return [
            f"data.{name} = {template!r} has an unnamed field; name one of the row's, "
            'as in "{question}"'
        ]
    return []


def _no_field(field: str, row: Mapping[str, Any], setting: str, i: int) -> DataError:
    return DataError(
        f"row {i} has no field {field!r}, which {setting} names{did_you_mean(field, row)} "
        f"(its fields: {_fields(row)})"
    )


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


def data_problems(config: DataConfig) -> list[str]:
    """List what is wrong with this configuration, each with what to do."""
    problems = []
    for name in ("prompt", "response", "rejected", "answer"):
        if (template := getattr(config, name)) is not None:
            problems += template_problems(name, template)

    # Responses
    if config.rejected is not None and config.response is None and config.messages is None:
        problems.append(
            "data.rejected is the worse of two responses; give the better one too, data.response"
        )
    if config.unsafe and (len(config.unsafe) != 2 or config.rejected is None):
        problems.append(
            "data.unsafe names two fields, one of the response and one of the rejected one "
            f"(data.rejected); got {list(config.unsafe)}"
        )

    # Chats
    if config.messages is not None and config.prompt != "{prompt}":
        problems.append("data.messages and data.prompt are both given; keep one of them")
    if config.messages is not None and config.bos:
        problems.append(
            "data.bos = true with data.messages would give two bos tokens; leave it to the chat "
            "template"
        )

    # Patterns
    if (config.pattern is None) != (config.pattern_field is None):
        problems.append(
            "data.pattern (a regex) and data.pattern_field (the field it searches) go together; "
            "give both"
        )
    if config.pattern is not None:
        try:
            if not re.compile(config.pattern).groupindex:
                problems.append(
                    f"data.pattern {config.pattern!r} has no named group; "
                    "write one as (?P<name>...)"
                )
        except re.error as error:
            problems.append(f"data.pattern {config.pattern!r} is not a regular expression: {error}")
    return problems
