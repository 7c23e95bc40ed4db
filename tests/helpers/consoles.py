"""Consoles that keep what is printed."""

from __future__ import annotations

import io

from rich.console import Console


def console(width: int = 100, terminal: bool | None = None) -> tuple[Console, io.StringIO]:
    """A console, and what it has printed so far; plain text unless it is a terminal."""
    out = io.StringIO()
    return Console(
        file=out, markup=False, highlight=False, width=width, force_terminal=terminal
    ), out
