"""Texts that a user reads, and texts that nobody vouches for."""

from __future__ import annotations

import json
from typing import Any


def shorten(text: str, limit: int = 80) -> str:
    """Return the repr of a text, cut in the middle when the text is longer than `limit`."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
