"""A source's rows as texts, by the settings of [data].

    fields of a source's row
        |  pattern: each match of a regex becomes a row of its own
    fields of a row
        |  prompt, response, rejected, answer: format templates; messages: a chat
        |  a template that is one field, "{prompt}", may stand for a chat too (core/data/chats.py)
    RenderedRow

Errors name the row and the setting.
"""

from __future__ import annotations

import re
import string
from _string import formatter_field_name_split  # what string.Formatter itself splits by
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from hybridflow.core.data.chats import (
    Message,
    is_chat,
    messages_of,
    split_prompt,
    template_options,
)
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.core.names import did_you_mean
from hybridflow.core.values.text import shorten

if TYPE_CHECKING:
    from hybridflow.core.contracts.data_source import DataConfig, DataSource


@attrs.frozen(eq=False)
class RenderedRow:
    """One row as texts: exactly one of `prompt` and `messages` is set."""

    prompt: str | None
    messages: list[Message] | None
    """A chat, without the assistant's last message if that is the response."""
    response: str | list[Message] | None
    """A text, or messages that continue `messages`."""
    meta: dict[str, Any]
    """The row's fields, and `answer` where data.answer is set."""
    rejected: str | list[Message] | None = None
    tools: list[Any] = attrs.field(factory=list)
    """Functions that the assistant may call, for the chat template."""
    template_kwargs: dict[str, Any] = attrs.field(factory=dict)
    """Further arguments of the chat template."""
    unsafe: tuple[bool, ...] = ()
    """Whether the response and the rejected one are unsafe, where data.unsafe is set."""

    def texts(self) -> Iterator[str]:
        """Yield every text that a tokenizer must encode, the expected answer included."""
        if self.prompt is not None:
            yield self.prompt
        for part in (self.messages, self.response, self.rejected):
            if isinstance(part, str):
                yield part
            else:
                yield from (str(message.get("content") or "") for message in part or ())
        if isinstance(self.meta.get("answer"), str):
            yield self.meta["answer"]


class Rows(Sequence):
    """The rows of a source after `pattern`, rendered on access.

    Raises ConfigError for contradicting settings, and DataError with the row and field.
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
        response = self._filled("response", row, i)
        rejected = self._filled("rejected", row, i)
        meta = dict(row)
        if config.answer is not None:
            meta["answer"] = render(config.answer, row, "answer", i)
        unsafe = self._unsafe(row, i)

        chat = self._chat(row, response, rejected, i)
        if chat is None:
            prompt = render(config.prompt, row, "prompt", i)
            if isinstance(response, list) or isinstance(rejected, list):
                raise DataError(
                    f"row {i}: data.response or data.rejected is a chat and data.prompt is a text, "
                    f"{shorten(prompt)}; name the field with the prompt's messages"
                )
            return RenderedRow(prompt, None, response, meta, rejected, unsafe=unsafe)

        tools, kwargs = template_options(row, config.chat_template_kwargs, i)
        messages, response, rejected = self._parts(chat, response, rejected, i)
        return RenderedRow(None, messages, response, meta, rejected, tools, kwargs, unsafe)

    def _filled(self, name: str, row: Mapping[str, Any], i: int) -> str | list[Message] | None:
        """Return the text of a setting of [data], or the chat that its only field holds."""
        template = getattr(self.config, name)
        if template is None:
            return None
        found, value = single_field(template, row)
        if found and is_chat(value):
            return messages_of(value)
        return render(template, row, name, i)

    def _chat(
        self, row: Mapping[str, Any], response: Any, rejected: Any, i: int
    ) -> list[Message] | None:
        """Return the prompt's messages, of data.messages or data.prompt; None for a text."""
        config = self.config
        if config.messages is not None:
            return self._messages(row, i)
        found, value = single_field(config.prompt, row)
        if found and is_chat(value):
            if config.bos:
                raise DataError(
                    f"row {i}: data.prompt is a chat, and data.bos = true would give two bos "
                    "tokens; leave it to the chat template"
                )
            return messages_of(value)

        # The prompt may be given only as part of the responses.
        chats = [part for part in (response, rejected) if isinstance(part, list)]
        if chats and any(message["role"] != "assistant" for message in chats[0]):
            return split_prompt(chats)
        return None

    def _parts(
        self, messages: list[Message], response: Any, rejected: Any, i: int
    ) -> tuple[list[Message], Any, Any]:
        """Split a row's chat into its prompt, its response and the rejected one."""
        # A response that repeats the prompt's messages is cut after them.
        count = len(messages)
        parts = []
        for part in (response, rejected):
            repeats = isinstance(part, list) and part[:count] == messages
            parts.append(part[count:] if repeats else part)
        response, rejected = parts

        # In a chat the assistant's last message is the response, and the rest is the prompt.
        if messages and messages[-1]["role"] == "assistant":
            if response is not None:
                raise DataError(
                    f"row {i}: the prompt's chat ends with the assistant's message, which is the "
                    "response, and data.response gives another; remove data.response"
                )
            response = [messages.pop()]
        if not messages:
            raise DataError(f"row {i}: there is no message before the assistant's, so no prompt")
        return messages, response, rejected

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

        if not is_chat(row[name]):
            raise DataError(
                f"row {i}: the field {name!r} must be a list of messages such as "
                f'{{"role": "user", "content": "..."}}; got {shorten(repr(row[name]))}'
            )
        return messages_of(row[name])

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
    """str.format that reads tables by dots, and refuses to print values as Python's repr."""

    def get_field(self, field_name, args, kwargs):
        first, rest = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, key in rest:
            if is_attribute and isinstance(value, Mapping):
                if key not in value:
                    raise ValueError(
                        f"{field_name!r}: there is no {key!r}{did_you_mean(key, value)} "
                        f"(there are: {_fields(value)})"
                    )
                value = value[key]
            else:
                value = getattr(value, key) if is_attribute else value[key]
        if value is None:
            raise ValueError(f"the field {field_name!r} is null")
        self._field = field_name
        return value, first

    def format_field(self, value, format_spec):
        # After a conversion ("{choices!r}") it is a text, which is intended.
        if isinstance(value, Mapping | Set | np.ndarray) or (
            isinstance(value, Sequence) and not isinstance(value, str)
        ):
            kind = "table" if isinstance(value, Mapping) else "list"
            raise ValueError(
                f"the field {self._field!r} is a {kind}, {shorten(repr(value))}, and no text; "
                f"name what is in it ({{{self._field}{_inner(value)}}}), or a chat by itself"
            )
        return super().format_field(value, format_spec)


def _inner(value: Any) -> str:
    """Return an example of how a template indexes into a table or a list, for a message."""
    return f".{next(iter(value), 'key')}" if isinstance(value, Mapping) else "[0]"


def single_field(template: str, row: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return (true, the field's value) if a template is a single field, as "{prompt}"."""
    pieces = list(string.Formatter().parse(template))
    if len(pieces) != 1 or pieces[0][0] or pieces[0][1] is None or pieces[0][2] or pieces[0][3]:
        return False, None
    try:
        return True, _Formatter().get_field(pieces[0][1], (), row)[0]
    except Exception:  # `render` will raise the error
        return False, None


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
    """Return problems of a template that show without any row."""
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
    """Return the problems of this configuration, each with its remedy."""
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
