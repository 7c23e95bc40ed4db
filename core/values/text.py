"""A helper for messages that a user reads."""

from __future__ import annotations


def shorten(text: str, limit: int = 80) -> str:
    """The repr of a text for a message, cut in the middle when it is long."""
    return repr(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2) :]}")
