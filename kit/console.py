"""Tables for a reader: drawn by rich on a terminal, plain aligned text, one line per row, where it is not one."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDEST = 60
"""Plain columns are padded to at most this; longer cells push the rest of their line to the right."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The command ends quietly when its reader has seen enough; rich would end it with status 1."""
        raise BrokenPipeError


def make_console() -> Console:
    return _Console(highlight=False, markup=False, emoji=False)


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """One line; a terminal wraps it, plain text is left as it is."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    header: bool = True,
    below: Sequence[str] = (),
) -> None:
    """`rows` of cells under `columns`, without columns that are empty in every row. `below`: a text for each row."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    if console.is_terminal:
        table = Table(
            box=box.SIMPLE_HEAD if header else None,
            show_header=header,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for i in kept:
            longest = max(len(cell) for cell in (columns[i] * header, *(row[i] for row in rows)))
            whole = min(longest, console.width // 3) if i in kept[:2] else None  # names break last
            table.add_column(
                columns[i], overflow="fold", style="bold" if i == kept[0] else "", min_width=whole
            )
        if any(below):
            table.add_column("meaning", overflow="fold", style="dim")
        for row, text in zip(rows, below or [""] * len(rows), strict=True):
            table.add_row(*(Text(row[i]) for i in kept), *([Text(text)] if any(below) else []))
        console.print(table)
        return
    lines = [[columns[i] for i in kept]] * header + [[row[i] for i in kept] for row in rows]
    widths = [min(max(len(line[i]) for line in lines), WIDEST) for i in range(len(kept))]
    for at, line in enumerate(lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print_line(console, text.rstrip())
        if at >= header and any(below) and (text := below[at - header]):
            print_line(console, f"    # {text}")
