"""Chats in a row: lists of messages, as TRL's conversational data sets have them.

prompt      [user]                          the prompt
completion  [assistant]                     data.response = "{completion}"
chosen      [assistant], or [user, assistant] with the prompt in it
rejected    likewise
tools       functions for the assistant     goes to the chat template
chat_template_kwargs                        likewise, over data.chat_template_kwargs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.core.errors import DataError
from hybridflow.core.values.text import parse_json, shorten

Message = dict[str, Any]
TOOLS = "tools"
KWARGS = "chat_template_kwargs"


def is_chat(value: Any) -> bool:
    """Return whether a field's value is a list of messages with roles, and not empty."""
    # A string is a sequence too, and no list of messages.
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return (
        is_list
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def messages_of(value: Any) -> list[Message]:
    """Return a chat's messages without the keys that have no value.

    Columnar files give every message of a column the same keys.
    """
    return [
        {key: inner for key, inner in message.items() if inner is not None} for message in value
    ]


def split_prompt(chats: Sequence[list[Message]]) -> list[Message]:
    """Return the common first messages of chats, up to the assistant's answer.

    `chats` are one row's response and, for preferences, the rejected one.
    """
    common: list[Message] = []
    for turns in zip(*chats, strict=False):
        if any(turn != turns[0] for turn in turns):
            break
        common.append(turns[0])
    # The assistant's last turns are the response, also where both chats are equal.
    while common and common[-1]["role"] == "assistant":
        common.pop()
    return common


def template_options(
    row: Mapping[str, Any], given: Mapping[str, Any], i: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return row `i`'s tools, and the further arguments of its chat template. Raises DataError."""
    tools = _decoded(row.get(TOOLS))
    if tools is not None and not isinstance(tools, list):
        raise DataError(
            f"row {i}: the field {TOOLS!r} must be a list of functions, as JSON schemas; "
            f"got {shorten(repr(row[TOOLS]))}"
        )
    own = _decoded(row.get(KWARGS))
    if own is not None and not isinstance(own, Mapping):
        raise DataError(
            f"row {i}: the field {KWARGS!r} must be a table such as "
            f'{{"enable_thinking": false}}; got {shorten(repr(row[KWARGS]))}'
        )
    # Columnar files give every row the same keys.
    present = {key: value for key, value in (own or {}).items() if value is not None}
    return tools or [], {**given, **present}


def _decoded(value: Any) -> Any:
    """Return the value of a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value
