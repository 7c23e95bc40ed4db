"""Metrics that do not depend on how rows were split: every mean is a (sum, count) pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Metrics:
    """Means as name -> (sum, count), and maxima as name -> value.

    `merge` adds the pairs and takes the maxima.
    """

    __slots__ = ("maxima", "means")

    def __init__(
        self,
        means: Mapping[str, tuple[float, float]] | None = None,
        maxima: Mapping[str, float] | None = None,
    ):
        # Plain floats, whatever came: tensors would hold on to device memory.
        self.means = {}
        for name, (total, count) in (means or {}).items():
            self.means[name] = (float(total), float(count))
        self.maxima = {name: float(value) for name, value in (maxima or {}).items()}

    @classmethod
    def of(cls, **values: float) -> Metrics:
        """Make means of plain values, each with count one."""
        return cls({name: (value, 1.0) for name, value in values.items()})

    @classmethod
    def merge(cls, many: Iterable[Metrics]) -> Metrics:
        """Merge the metrics of several parts into those of the whole."""
        # A mean over all rows is the sum of all sums over the sum of all counts.
        merged = cls()
        for metrics in many:
            for name, (total, count) in metrics.means.items():
                old_total, old_count = merged.means.get(name, (0.0, 0.0))
                merged.means[name] = (old_total + total, old_count + count)
            for name, value in metrics.maxima.items():
                merged.maxima[name] = max(value, merged.maxima.get(name, value))
        return merged

    def values(self) -> dict[str, float]:
        """Return name -> mean or maximum; means without any count are left out."""
        means = {name: total / count for name, (total, count) in self.means.items() if count}
        return {**means, **self.maxima}

    def prefixed(self, prefix: str) -> Metrics:
        """Return the same metrics with `prefix` before each name."""
        return Metrics(
            {f"{prefix}{name}": pair for name, pair in self.means.items()},
            {f"{prefix}{name}": value for name, value in self.maxima.items()},
        )

    def __getitem__(self, name: str) -> float:
        return self.values()[name]

    def __contains__(self, name: str) -> bool:
        return name in self.means or name in self.maxima

    def __bool__(self) -> bool:
        return bool(self.means or self.maxima)

    def __repr__(self) -> str:
        figures = (f"{name}={value:.4g}" for name, value in self.values().items())
        return f"Metrics({', '.join(figures)})"
