"""Metrics that do not depend on how rows were split: every mean is a (sum, count) pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Metrics:
    """name -> (sum, count) for means, and name -> value for maxima. `merge` adds the pairs and takes the maxima."""

    __slots__ = ("maxima", "means")

    def __init__(
        self,
        means: Mapping[str, tuple[float, float]] | None = None,
        maxima: Mapping[str, float] | None = None,
    ):
        self.means = {k: (float(s), float(n)) for k, (s, n) in (means or {}).items()}
        self.maxima = {k: float(v) for k, v in (maxima or {}).items()}

    @classmethod
    def of(cls, **values: float) -> Metrics:
        """Plain values, each with count one."""
        return cls({name: (value, 1.0) for name, value in values.items()})

    @classmethod
    def merge(cls, many: Iterable[Metrics]) -> Metrics:
        out = cls()
        for metrics in many:
            for name, (total, count) in metrics.means.items():
                s, n = out.means.get(name, (0.0, 0.0))
                out.means[name] = (s + total, n + count)
            for name, value in metrics.maxima.items():
                out.maxima[name] = max(value, out.maxima.get(name, value))
        return out

    def values(self) -> dict[str, float]:
        """name -> mean or maximum; means without any count are left out."""
        means = {name: total / count for name, (total, count) in self.means.items() if count}
        return {**means, **self.maxima}

    def prefixed(self, prefix: str) -> Metrics:
        return Metrics(
            {f"{prefix}{k}": v for k, v in self.means.items()},
            {f"{prefix}{k}": v for k, v in self.maxima.items()},
        )

    def __getitem__(self, name: str) -> float:
        return self.values()[name]

    def __contains__(self, name: str) -> bool:
        return name in self.means or name in self.maxima

    def __bool__(self) -> bool:
        return bool(self.means or self.maxima)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{k}={v:.4g}' for k, v in self.values().items())})"
