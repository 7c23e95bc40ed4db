"""Prints tables for a reader.

On a terminal rich draws them. Elsewhere they are plain aligned text, one line per row.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDEST = 60
"""Plain columns are padded to at most this many characters; longer cells push the rest of their
line to the right."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, with which `main` ends the command quietly.

        rich would end it with status 1.
        """
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console that prints text unchanged, without markup, emoji or highlights."""
    return _Console(highlight=False, markup=False, emoji=False)


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """Print one line; a terminal wraps it, plain text is not wrapped."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    header: bool = True,
    below: Sequence[str] = (),
) -> None:
    """Print `rows` of cells under `columns`, without columns that are empty in every row.

    `below` has a text for each row. It stands under the row, or on a terminal in a last column.
    """
    # Columns without any text are left out.
    used = []
    for i in range(len(columns)):
        if any(row[i] for row in rows):
            used.append(i)

    # On a terminal and in a pipe the same cells are shown.
    titles = _cells(columns, used)
    lines = [_cells(row, used) for row in rows]
    texts = list(below) or [""] * len(rows)
    if console.is_terminal:
        _draw(console, titles, lines, header, texts)
    else:
        _print_plain(console, titles, lines, header, texts)


def _cells(row: Sequence[str], used: Sequence[int]) -> list[str]:
    return [row[i] for i in used]


def _draw(
    console: Console,
    titles: Sequence[str],
    lines: Sequence[Sequence[str]],
    header: bool,
    texts: Sequence[str],
) -> None:
    """Draw a table on a terminal, which folds cells that do not fit."""
    table = Table(
        box=box.SIMPLE_HEAD if header else None,
        show_header=header,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for position, title in enumerate(titles):
        column = [line[position] for line in lines]
        if header:
            column.append(title)

        # The first two columns are names, which fold last.
        min_width = None
        if position < 2:
            min_width = min(max(map(len, column)), console.width // 3)
        style = "bold" if position == 0 else ""
        table.add_column(title, overflow="fold", style=style, min_width=min_width)

    has_texts = any(texts)
    if has_texts:
        table.add_column("meaning", overflow="fold", style="dim")

    # As Text, so that brackets in a cell are no markup.
    for line, text in zip(lines, texts, strict=True):
        cells = [*line, text] if has_texts else line
        table.add_row(*map(Text, cells))
    console.print(table)


def _print_plain(
    console: Console,
    titles: Sequence[str],
    lines: Sequence[Sequence[str]],
    header: bool,
    texts: Sequence[str],
) -> None:
    """Print a table as aligned text."""
    # A column is as wide as its longest cell, up to a limit.
    shown = [titles, *lines] if header else lines
    widths = []
    for position in range(len(titles)):
        longest = max(len(line[position]) for line in shown)
        widths.append(min(longest, WIDEST))

    if header:
        print_line(console, _aligned(titles, widths))
    for line, text in zip(lines, texts, strict=True):
        print_line(console, _aligned(line, widths))
        if text:
            print_line(console, f"    # {text}")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    # Without the blanks that pad the last column.
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()
