"""A plan's figures as text."""

from __future__ import annotations

import io

from rich.console import Console

from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.values.units import amount
from hybridflow.kit.console import print_line, print_table

COLUMNS = ("rank", "receives", "sends", "aliased", "copied locally", "peak weights", "redundant")


def explain(plan: ReshardPlan, limit: int = 16) -> str:
    text = io.StringIO()
    console = Console(file=text, width=160, highlight=False, markup=False, emoji=False)
    print_explained(console, plan, limit)
    return text.getvalue()


def print_explained(console: Console, plan: ReshardPlan, limit: int = 16) -> None:
    """One line for each of the first `limit` ranks, then the largest of each figure and the totals."""

    def cells(rank: int) -> tuple[int, ...]:
        local = plan.bytes_local[rank] - plan.bytes_aliased[rank]
        return (
            plan.bytes_received[rank], plan.bytes_sent[rank], plan.bytes_aliased[rank], local, plan.peak_bytes[rank],
            plan.bytes_redundant[rank],
        )  # fmt: skip

    figures = {rank: cells(rank) for rank in plan.ranks}
    rows = [(str(rank), *map(amount, figures[rank])) for rank in plan.ranks[:limit]]
    if len(plan.ranks) > limit:
        rows.append(("...", *[""] * (len(COLUMNS) - 1)))
    rows.append(("most", *(amount(max(column)) for column in zip(*figures.values(), strict=True))))
    print_table(console, COLUMNS, rows)
    moved = sum(plan.bytes_received.values())
    print_line(console)
    print_line(
        console,
        f"{amount(moved)} over {len(plan.transfers):,} transfers of {len(plan.wire):,} parameters, in buckets of at most "
        f"{amount(plan.bucket_bytes)}; buckets come on top of the peak",
    )
