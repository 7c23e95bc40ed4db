"""The figures of a resharding plan as text, rank by rank."""

from __future__ import annotations

import io

from rich.console import Console

from hybridflow.core.resharding.plan import ReshardPlan
from hybridflow.core.values.units import amount
from hybridflow.kit.console import print_line, print_table

COLUMNS = ("rank", "receives", "sends", "aliased", "copied locally", "peak weights", "redundant")


def explain(plan: ReshardPlan, limit: int = 16) -> str:
    """Return as text what print_explained prints."""
    # Wide enough that no row is broken.
    text = io.StringIO()
    console = Console(file=text, width=160, highlight=False, markup=False, emoji=False)
    print_explained(console, plan, limit)
    return text.getvalue()


def print_explained(console: Console, plan: ReshardPlan, limit: int = 16) -> None:
    """Print a row for each of the first `limit` ranks, then the largest figures and the totals."""

    def cells(rank: int) -> tuple[int, ...]:
        """Return the bytes of a rank, in the order of COLUMNS."""
        return (
            plan.bytes_received[rank],
            plan.bytes_sent[rank],
            plan.bytes_aliased[rank],
            plan.bytes_local[rank] - plan.bytes_aliased[rank],
            plan.peak_bytes[rank],
            plan.bytes_redundant[rank],
        )

    figures = {rank: cells(rank) for rank in plan.ranks}
    rows = []
    for rank in plan.ranks[:limit]:
        rows.append((str(rank), *map(amount, figures[rank])))
    if len(plan.ranks) > limit:
        rows.append(("...", *[""] * (len(COLUMNS) - 1)))

    # The largest of all ranks, also of those that are not listed.
    columns = zip(*figures.values(), strict=True)
    rows.append(("most", *(amount(max(column)) for column in columns)))
    print_table(console, COLUMNS, rows)

    # The total of sent bytes.
    moved = sum(plan.bytes_received.values())
    print_line(console)
    print_line(
        console,
        f"{amount(moved)} over {len(plan.transfers):,} transfers of {len(plan.wire):,} parameters, "
        f"in buckets of at most {amount(plan.bucket_bytes)}; buckets come on top of the peak",
    )
