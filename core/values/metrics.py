"""Metrics that do not depend on how rows were split: means (sums, counts), maxima, spreads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

PERCENTILES = (10, 50, 90)
"""The percentiles that are reported of values."""


class Metrics:
    """Means as name -> (sum, count), maxima as name -> value, and spreads as name -> values.

    `merge` adds the pairs, takes the maxima and puts the values together. Of the values of a spread
    their distribution is reported: <name>_std (of all of them), _min, _p10, _p50, _p90 and _max.

    `recorded` is no metric: name -> row's number -> the values of its tokens, of rows to record.
    """

    __slots__ = ("maxima", "means", "recorded", "spreads")

    def __init__(
        self,
        means: Mapping[str, tuple[float, float]] | None = None,
        maxima: Mapping[str, float] | None = None,
        spreads: Mapping[str, Any] | None = None,
        recorded: Mapping[str, dict[int, np.ndarray]] | None = None,
    ):
        # Plain floats of any input: tensors would keep device memory.
        self.means = {}
        for name, (total, count) in (means or {}).items():
            self.means[name] = (float(total), float(count))
        self.maxima = {name: float(value) for name, value in (maxima or {}).items()}
        self.spreads = {
            name: np.asarray(values, np.float32) for name, values in (spreads or {}).items()
        }
        self.recorded = dict(recorded or {})

    @classmethod
    def of(cls, **values: float) -> Metrics:
        """Make means of plain values, each with count one."""
        return cls({name: (value, 1.0) for name, value in values.items()})

    @classmethod
    def merge(cls, many: Iterable[Metrics]) -> Metrics:
        """Merge the metrics of several parts into those of the whole."""
        # A mean over all rows is the sum of all sums over the sum of all counts.
        merged = cls()
        spreads: dict[str, list[np.ndarray]] = {}
        for metrics in many:
            for name, (total, count) in metrics.means.items():
                old_total, old_count = merged.means.get(name, (0.0, 0.0))
                merged.means[name] = (old_total + total, old_count + count)
            for name, value in metrics.maxima.items():
                merged.maxima[name] = max(value, merged.maxima.get(name, value))
            for name, values in metrics.spreads.items():
                spreads.setdefault(name, []).append(values)
            for name, rows in metrics.recorded.items():
                merged.recorded.setdefault(name, {}).update(rows)
        merged.spreads = {name: np.concatenate(parts) for name, parts in spreads.items()}
        return merged

    def values(self) -> dict[str, float]:
        """Return name -> figure; means with count 0 and spreads without values are left out."""
        figures = {name: total / count for name, (total, count) in self.means.items() if count}
        figures |= self.maxima
        for name, values in self.spreads.items():
            if len(values):
                figures |= {f"{name}_{label}": value for label, value in _distribution(values)}
        return figures

    def prefixed(self, prefix: str) -> Metrics:
        """Return the same metrics with `prefix` before each name."""
        return Metrics(
            {f"{prefix}{name}": pair for name, pair in self.means.items()},
            {f"{prefix}{name}": value for name, value in self.maxima.items()},
            {f"{prefix}{name}": values for name, values in self.spreads.items()},
            {f"{prefix}{name}": rows for name, rows in self.recorded.items()},
        )

    def __getitem__(self, name: str) -> float:
        return self.values()[name]

    def __contains__(self, name: str) -> bool:
        return name in self.means or name in self.maxima

    def __bool__(self) -> bool:
        return bool(self.means or self.maxima or self.spreads or self.recorded)

    def __repr__(self) -> str:
        figures = (f"{name}={value:.4g}" for name, value in self.values().items())
        return f"Metrics({', '.join(figures)})"


def _distribution(values: np.ndarray) -> Iterable[tuple[str, float]]:
    """Yield (label, figure) of values, at least one."""
    # In float64, since the values of many rows would lose digits in float32.
    wide = values.astype(np.float64)
    labels = ("min", *(f"p{percent}" for percent in PERCENTILES), "max")
    yield "std", float(wide.std())
    yield from zip(labels, np.percentile(wide, (0, *PERCENTILES, 100)).tolist(), strict=True)
