"""A helper for messages that a user reads."""

from __future__ import annotations


def shorten(text: str, limit: int = 80) -> str:
    """Return the repr of a text, cut in the middle when the text is longer than `limit`."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text)
