"""Repeated messages during slow work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
"""Seconds between two messages."""


@contextmanager
def said_meanwhile(
    say: Callable[[str], None], text: Callable[[], str], every_s: float = EVERY_S
) -> Iterator[None]:
    """Call `say("TEXT (20 s)")` every `every_s` seconds, from a thread, until the body ends."""
    over = threading.Event()
    started = time.monotonic()

    def talk() -> None:
        while not over.wait(every_s):
            say(f"{text()} ({time.monotonic() - started:.0f} s)")

    # A daemon, so that it never keeps a process alive.
    thread = threading.Thread(target=talk, daemon=True, name="said-meanwhile")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
