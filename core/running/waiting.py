"""A sign of life while something slow goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0


@contextmanager
def said_meanwhile(
    say: Callable[[str], None], text: Callable[[], str], every_s: float = EVERY_S
) -> Iterator[None]:
    """`say` "TEXT (20 s)" now and then, from a thread, until the body ends."""
    over, started = threading.Event(), time.monotonic()

    def talk() -> None:
        while not over.wait(every_s):
            say(f"{text()} ({time.monotonic() - started:.0f} s)")

    thread = threading.Thread(target=talk, daemon=True, name="said-meanwhile")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
