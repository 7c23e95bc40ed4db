"""Waits for what comes about by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What the condition says once it holds; fails where it does not in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it takes longer than {seconds:g} s"
        time.sleep(0.01)
    return found
