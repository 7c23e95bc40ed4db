"""What every benchmark prints: one JSON object per line."""

from __future__ import annotations

import json


def emit(
    name: str, value: float, unit: str, *, ratio: float | None = None, against: str | None = None,
    bar: float | None = None, at_most: bool = False,
) -> bool:  # fmt: skip
    """Print a figure; give whether its bar is met: `ratio` (or `value` without one) at least `bar`, or at most."""
    line: dict[str, object] = {"name": name, "value": _round(value), "unit": unit}
    if ratio is not None:
        line |= {"ratio": _round(ratio), "against": against}
    met = True
    if bar is not None:
        measured = value if ratio is None else ratio
        met = measured <= bar if at_most else measured >= bar
        line |= {"bar": bar, "met": met}
    print(json.dumps(line), flush=True)
    return met


def _round(value: float) -> float:
    return float(f"{value:.4g}")
