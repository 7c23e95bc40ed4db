"""Amounts and times as short texts for readers."""

from __future__ import annotations

BUCKET_MB = 64.0
"""Limit of the messages of a weight transfer that are in flight, per rank, in 10^6 bytes."""


def amount(nbytes: float) -> str:
    """Format a number of bytes in decimal units, for example "1.50 GB"."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    for unit, size in units.items():
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"


def seconds(value: float) -> str:
    """Format a time given in seconds, for example "12.3 s", "0.46 s" or "7.8 ms"."""
    if value >= 10:
        return f"{value:.1f} s"
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{1000 * value:.1f} ms"
