"""Figures of the documentation are what the code draws."""

import importlib.util

from helpers.paths import DOCS


def make_figures():
    spec = importlib.util.spec_from_file_location("make_figures", DOCS / "make_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_grouping_figure_is_up_to_date():
    module = make_figures()
    assert module.FIGURE.read_text() == module.draw(), "docs/grouping.svg is stale: run python docs/make_figures.py"


def test_the_figure_says_what_the_paper_says():
    cells, groups, received, redundant = make_figures().cells("zero-redundancy")
    assert groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert set(received.values()) == {4} and set(redundant.values()) == {0}  # a quarter, one element of four bytes
    assert all(c.count("redundant") == 0 and c.count("keeps") == 1 for c in cells.values())
    assert max(make_figures().cells("consecutive")[3].values()) == 4
