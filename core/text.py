"""Small helpers for messages that a user reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def shorten(text: str, limit: int = 80) -> str:
    """The repr of a text for a message, cut in the middle when it is long."""
    return repr(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2) :]}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """An addition to a message that names the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
