"""From the model's text to a message: its thinking, its content, and its calls of tools.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>   Qwen, Hermes and others
    json     the whole turn is {"name": ..., "parameters": {...}}       Llama 3
    none     a turn is its content

A call that cannot be read stays part of the content, as in the engines' own servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

THINKING_ENDS = "</think>"
OPENS, CLOSES = "<tool_call>", "</tool_call>"
Calls = list[tuple[str, dict[str, Any]]]
"""(name, arguments) of each call."""


def message_of(text: str, tools: str, turn: int) -> dict[str, Any]:
    """Return a turn of the model as a message in the form of OpenAI's chat completions.

    tools: one of FORMATS; turn: its number, from which the ids of calls are made.
    """
    made: dict[str, Any] = {"role": "assistant"}
    thinking, ends, rest = text.partition(THINKING_ENDS)
    if ends:
        made["reasoning_content"] = thinking.removeprefix("<think>").strip("\n")
        text = rest.lstrip("\n")
    made["content"], calls = FORMATS[tools](text)
    if calls:
        made["tool_calls"] = [
            {
                # Nine letters and digits: Mistral's template takes no others.
                "id": f"c{turn:05d}{number:03d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return made


def _hermes(text: str) -> tuple[str, Calls]:
    """A text without end is read in a time that grows with its length alone."""
    rest: list[str] = []
    calls: Calls = []
    at = 0
    while (start := text.find(OPENS, at)) >= 0 and (end := text.find(CLOSES, start)) >= 0:
        call = _call(text[start + len(OPENS) : end])
        if call is None:
            return text, []
        calls.append(call)
        rest.append(text[at:start])
        at = end + len(CLOSES)
    if not calls:
        return text, []
    return "".join([*rest, text[at:]]).strip(), calls


def _json(text: str) -> tuple[str, Calls]:
    call = _call(text)
    return (text, []) if call is None else ("", [call])


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return (name, arguments) of a call written as JSON; None where it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):  # the latter for brackets within brackets
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], arguments) if isinstance(arguments, dict) else None


FORMATS: dict[str, Callable[[str], tuple[str, Calls]]] = {
    "hermes": _hermes,
    "json": _json,
    "none": lambda text: (text, []),
}
"""Name -> function (text) -> content, and the calls in it."""
