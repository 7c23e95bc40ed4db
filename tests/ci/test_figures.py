"""Figures of the documentation are what the code draws."""

from helpers.paths import script


def test_the_grouping_figure_is_up_to_date():
    module = script("figures")
    assert module.FIGURE.read_text() == module.draw(), (
        "docs/grouping.svg is stale: run python ci/figures.py"
    )


def test_the_figure_says_what_the_paper_says():
    cells, groups, received, redundant = script("figures").cells("zero-redundancy")
    assert groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert set(received.values()) == {4} and set(redundant.values()) == {
        0
    }  # a quarter, one element of four bytes
    assert all(c.count("redundant") == 0 and c.count("keeps") == 1 for c in cells.values())
    assert max(script("figures").cells("consecutive")[3].values()) == 4
