"""Draws docs/grouping.svg: which quarter of the weights each rank holds, keeps and receives, under both groupings.

`python ci/figures.py` writes it; a test says when it is stale. What is drawn comes from the planner.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, Param, WeightLayout

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "grouping.svg"
TRAIN, TP = ParallelLayout(tp=4, dp=2), 2
CELL, GAP, LEFT, TOP, BLOCK = 34, 16, 210, 64, 190
COLOURS = {"keeps": "#3b6fb6", "receives": "#a9c6e8", "redundant": "#d9534f", "": "#ffffff"}


def holdings(parts: int, part_of: dict[int, int]) -> WeightLayout:
    """A parameter of four rows, cut into `parts`."""
    size = 4 // parts
    held = {
        rank: {"w": (Box((part * size,), ((part + 1) * size,)),)} for rank, part in part_of.items()
    }
    return WeightLayout({"w": Param((4,), torch.float32)}, held)


def cells(
    grouping: str,
) -> tuple[dict[int, list[str]], list[list[int]], dict[int, int], dict[int, int]]:
    """Rank -> what each quarter is to it; the generation tp groups; elements received and redundant by rank."""
    generation = generation_layout(TRAIN, 1, TP, grouping)
    place = {rank: at for replica in generation.replicas for at, rank in enumerate(replica[0])}
    source = holdings(4, {r: TRAIN.coords(r).tp for r in range(TRAIN.world)})
    target = holdings(TP, place)
    plan = plan_reshard(source, target)

    def kind(rank: int, row: int) -> str:
        has, wants = (
            {i for b in side.held[rank]["w"] for i in range(b.start[0], b.stop[0])}
            for side in (source, target)
        )
        if row in wants:
            return "keeps" if row in has else "receives"
        return "redundant" if row in has else ""

    found = {rank: [kind(rank, row) for row in range(4)] for rank in range(TRAIN.world)}
    return found, generation.groups("tp"), plan.bytes_received, plan.bytes_redundant


def draw() -> str:
    width, height = LEFT + TRAIN.world * (CELL + GAP) + 30, TOP + 2 * BLOCK + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="15">Training 1-4-2 to generation 1-2-2-2: the quarters of the weights on '
        f"{TRAIN.world} ranks</text>",
    ]
    for block, grouping in enumerate(("consecutive", "zero-redundancy")):
        found, groups, received, redundant = cells(grouping)
        top = TOP + block * BLOCK
        name = {"consecutive": "ordinary groups", "zero-redundancy": "zero-redundancy groups"}[
            grouping
        ]
        worst = [max(f.values()) // 4 for f in (received, redundant)]
        said = [name, "tp groups", " ".join(f"[{a},{b}]" for a, b in groups[:2]), " ".join(f"[{a},{b}]" for a, b in groups[2:]),
                f"receives {worst[0]} of 4 quarters", f"redundant {worst[1]} of 4"]  # fmt: skip
        for at, text in enumerate(said):
            weight = ' font-weight="bold"' if at == 0 else ""
            lines.append(f'<text x="16" y="{top + 18 + 21 * at}"{weight}>{text}</text>')
        for rank, quarters in found.items():
            x = LEFT + rank * (CELL + GAP)
            lines.append(
                f'<text x="{x + CELL / 2}" y="{top - 6}" text-anchor="middle">rank {rank}</text>'
            )
            for row, kind in enumerate(quarters):
                lines.append(
                    f'<rect x="{x}" y="{top + row * CELL}" width="{CELL}" height="{CELL}" fill="{COLOURS[kind]}" '
                    'stroke="#555555"/>'
                )
    y = TOP + 2 * BLOCK + 14
    legend = (("keeps", "trained here, and generated with"), ("receives", "received"),
              ("redundant", "trained here, of no use in generation: a second copy"))  # fmt: skip
    x = 16
    for kind, text in legend:
        lines.append(
            f'<rect x="{x}" y="{y}" width="16" height="16" fill="{COLOURS[kind]}" stroke="#555555"/>'
        )
        lines.append(f'<text x="{x + 22}" y="{y + 13}">{text}</text>')
        x += 40 + 7 * len(text)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(draw())
    sys.exit(0)
