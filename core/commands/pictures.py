"""Pictures of plans; matplotlib draws them (the extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.core.errors import ConfigError
from hybridflow.core.mapping.search import Mapping
from hybridflow.core.mapping.workload import STAGES

COLOURS = ("#4878a8", "#e0a458", "#6aa56e", "#b5697a", "#8a78b0", "#7f8c8d")


def draw_steps(target: str | Path, plans: list[tuple[str | None, Mapping]]) -> None:
    """A row per pool, a bar per role and stage, over the seconds of a step; one below the other for several stages of a
    config. Raises ConfigError for a file that is neither .svg nor .png, and without matplotlib."""
    if Path(target).suffix not in (".svg", ".png"):
        raise ConfigError(f"--timeline {str(target)!r}: give a file that ends in .svg or .png")
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--timeline needs matplotlib: pip install 'hybridflow[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = sum(len(mapping.pools) for _, mapping in plans)
    settings: Any = {"svg.hashsalt": "hybridflow", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(
            len(plans), 1, figsize=(9, 1.2 * len(plans) + 0.5 * rows), layout="constrained", squeeze=False
        )
        names = sorted({name for _, mapping in plans for pool in mapping.pools for name in pool.names})
        colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        for (stage, mapping), area in zip(plans, axes[:, 0], strict=True):
            _draw(area, mapping, colour)
            area.set(xlabel="seconds of a step", title=stage or "")
        figure.legend(
            handles=[Patch(color=colour[n], label=n) for n in names], loc="outside lower center", ncols=6, frameon=False
        )
        try:
            figure.savefig(target, metadata={"Date": None} if Path(target).suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"--timeline {str(target)!r}: {error.strerror or error}") from error
        finally:
            pyplot.close(figure)


def _draw(area, mapping: Mapping, colour: dict[str, str]) -> None:
    begins = (0.0, mapping.stages[0], mapping.stages[0] + mapping.stages[1])
    for row, pool in enumerate(mapping.pools):
        for stage, begin in enumerate(begins):
            at = begin
            for choice in pool.entry.choices:
                own = choice.time(STAGES[stage])
                if own:
                    area.barh(row, own, left=at, color=colour[choice.option.model.name], height=0.6, edgecolor="white")
                at += own
    for end in (*begins[1:], mapping.seconds):
        area.axvline(end, color="#999999", linewidth=0.6)
    area.set_yticks(range(len(mapping.pools)), [f"{'+'.join(p.names)}\non {p.entry.devices}" for p in mapping.pools])
    area.invert_yaxis()
