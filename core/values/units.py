"""Figures for readers."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """Bytes in decimal units: 1.50 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"


def seconds(value: float) -> str:
    """12.3 s, 0.46 s, 7.8 ms."""
    return (
        f"{value:.1f} s"
        if value >= 10
        else f"{value:.2f} s"
        if value >= 0.1
        else f"{1000 * value:.1f} ms"
    )
