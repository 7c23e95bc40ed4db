"""Pictures of plans, drawn by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.core.contracts.planner import Plan
from hybridflow.core.errors import ConfigError

COLOURS = ("#4878a8", "#e0a458", "#6aa56e", "#b5697a", "#8a78b0", "#7f8c8d")
SETTINGS: Any = {
    "svg.hashsalt": "hybridflow",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Settings of matplotlib; with the salt, equal plans give equal files."""


def draw_steps(target: str | Path, plans: Mapping[str | None, Plan]) -> None:
    """Draw the step of each plan: a row per pool, a bar per role and step stage, over its seconds.

    The run stages of a config, by which `plans` go, stand one below the other. Raises ConfigError
    for a file that is neither .svg nor .png or cannot be written, and without matplotlib.
    """
    suffix = Path(target).suffix
    if suffix not in (".svg", ".png"):
        raise ConfigError(f"--timeline {str(target)!r}: give a file that ends in .svg or .png")
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--timeline needs matplotlib: pip install 'hybridflow[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    # Each run stage has one area; the figure grows with the number of pools in all.
    rows = sum(len(_pools(plan)) for plan in plans.values())
    with pyplot.rc_context(SETTINGS):
        figure, axes = pyplot.subplots(
            len(plans),
            1,
            figsize=(9, 1.2 * len(plans) + 0.5 * rows),
            layout="constrained",
            squeeze=False,
        )

        # A role has the same colour in all plans.
        roles: set[str] = set()
        for plan in plans.values():
            roles.update(bar.role for bar in plan.bars)
        names = sorted(roles)
        colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        for (stage, plan), area in zip(plans.items(), axes[:, 0], strict=True):
            _draw(area, plan, colour)
            area.set(xlabel="seconds of a step", title=stage or "")
        figure.legend(
            handles=[Patch(color=colour[name], label=name) for name in names],
            loc="outside lower center",
            ncols=6,
            frameon=False,
        )

        try:
            # Without a date, equal plans give equal files.
            figure.savefig(target, metadata={"Date": None} if suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"--timeline {str(target)!r}: {error.strerror or error}") from error
        finally:
            pyplot.close(figure)


def _pools(plan: Plan) -> list[str]:
    """Return the rows of a picture, from top to bottom."""
    return list(dict.fromkeys(bar.pool for bar in plan.bars))


def _draw(area: Any, plan: Plan, colour: Mapping[str, str]) -> None:
    """Draw one step, with a line at the end of each step stage."""
    pools = _pools(plan)
    # A bar without length would still draw its edge.
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
    area.invert_yaxis()  # the first pool at the top
