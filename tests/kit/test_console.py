"""Tables on a terminal and in a pipe."""

from __future__ import annotations

import os
import re

import pytest
from helpers.configs import console

from hybridflow.kit.console import WIDEST, make_console, print_line, print_table

ROWS = [["actor", "", "2 ranks"], ["the reward", "", "4"]]


def printed(*given, terminal: bool = False, width: int = 100, **options) -> str:
    made, out = console(width, terminal=terminal)
    print_table(made, *given, **options)
    return out.getvalue()


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_plain_columns_are_aligned_and_empty_ones_are_left_out():
    text = printed(["role", "note", "where"], ROWS)
    assert text == "role        where\nactor       2 ranks\nthe reward  4\n"


def test_without_a_header_and_with_a_text_below_each_row():
    text = printed(["role", "note", "where"], ROWS, header=False, below=["trained", ""])
    assert text == "actor       2 ranks\n    # trained\nthe reward  4\n"
    with_header = printed(["role", "note", "where"], ROWS, below=["", "scores"]).splitlines()
    assert with_header[2:] == ["the reward  4", "    # scores"]


def test_a_long_plain_cell_pushes_its_own_line_alone_and_is_never_wrapped():
    long = "x" * 200
    lines = printed(["a", "b"], [[long, "1"], ["short", "2"]], width=40).splitlines()
    header, last = f"{'a':{WIDEST}}  b", f"{'short':{WIDEST}}  2"
    assert lines == [header, f"{long}  1", last]


def test_a_terminal_wraps_cells_and_keeps_the_names_whole():
    rows = [["run.steps", "how often the algorithm steps"]]
    table = printed(["setting", "what"], rows, terminal=True, width=30)
    lines = [plain(line) for line in table.splitlines()]
    assert all(len(line) <= 30 for line in lines)
    assert [line.split()[0] for line in lines if "run" in line] == ["run.steps"]
    text = " ".join(word for line in lines for word in line.split() if word != "run.steps")
    assert text.endswith("how often the algorithm steps")


def test_a_terminal_shows_the_texts_below_as_a_column():
    text = printed(["role", "note"], [["actor", ""]], terminal=True, below=["trained"])
    assert "meaning" in text and "trained" in text and "note" not in text


def test_text_is_no_markup():
    made, out = console(20)
    print_line(made, "[pools] main = [2] and a line that is longer than the console")
    assert out.getvalue() == "[pools] main = [2] and a line that is longer than the console\n"
    assert "[red]x[/red]" in printed(["a"], [["[red]x[/red]"]], terminal=True)


def test_a_reader_that_has_seen_enough_does_not_end_the_process():
    """As BrokenPipeError, which the command answers; rich would exit with status 1."""
    reading, writing = os.pipe()
    os.close(reading)
    made = make_console()
    made.file = os.fdopen(writing, "w")
    with pytest.raises(BrokenPipeError):
        print_line(made, "nobody reads this")
    with pytest.raises(BrokenPipeError):  # what is left in its buffer
        made.file.close()
