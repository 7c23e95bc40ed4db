"""Pictures of plans; matplotlib draws them (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.core.contracts.planner import Plan
from hybridflow.core.errors import ConfigError

COLOURS = ("#4878a8", "#e0a458", "#6aa56e", "#b5697a", "#8a78b0", "#7f8c8d")


def draw_steps(target: str | Path, plans: Mapping[str | None, Plan]) -> None:
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

    rows = sum(len(_pools(plan)) for plan in plans.values())
    settings: Any = {
        "svg.hashsalt": "hybridflow",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(
            len(plans),
            1,
            figsize=(9, 1.2 * len(plans) + 0.5 * rows),
            layout="constrained",
            squeeze=False,
        )
        names = sorted({bar.role for plan in plans.values() for bar in plan.bars})
        colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        for (stage, plan), area in zip(plans.items(), axes[:, 0], strict=True):
            _draw(area, plan, colour)
            area.set(xlabel="seconds of a step", title=stage or "")
        figure.legend(
            handles=[Patch(color=colour[n], label=n) for n in names],
            loc="outside lower center",
            ncols=6,
            frameon=False,
        )
        try:
            figure.savefig(
                target, metadata={"Date": None} if Path(target).suffix == ".svg" else None
            )
        except OSError as error:
            raise ConfigError(f"--timeline {str(target)!r}: {error.strerror or error}") from error
        finally:
            pyplot.close(figure)


def _pools(plan: Plan) -> list[str]:
    """The rows of a picture, in their order."""
    return list(dict.fromkeys(bar.pool for bar in plan.bars))


def _draw(area: Any, plan: Plan, colour: Mapping[str, str]) -> None:
    pools = _pools(plan)
    for bar in plan.bars:
        if bar.seconds:
            row = pools.index(bar.pool)
            area.barh(
                row,
                bar.seconds,
                left=bar.started,
                color=colour[bar.role],
                height=0.6,
                edgecolor="white",
            )
    for end in plan.ends:
        area.axvline(end, color="#999999", linewidth=0.6)
    area.set_yticks(range(len(pools)), pools)
    area.invert_yaxis()
