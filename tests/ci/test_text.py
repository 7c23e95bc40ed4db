"""ci/text.py counts what makes code hard to read: beside counts by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "text.py"
SAMPLE = '''"""A module."""

class RunConfig:
    """Settings."""

    steps: int
    """How many."""
    name: str


def public(a, b):
    x, y = a(), b
    rows = [c for row in a for c in row]

    # A heading.
    return rows, x, y


def _private():
    return 1
'''


@pytest.fixture(scope="module")
def text():
    spec = importlib.util.spec_from_file_location("text_counter", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def figures(text, tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    return text.count([tmp_path])


def test_the_counts_of_a_sample_are_those_by_hand(figures):
    lines = 20
    expected = {
        "lines over 100 columns, %": 0.0,
        "blank lines in functions, %": 100 * 1 / (6 + 2),
        "comments per 100 lines": 100 * 1 / lines,
        "`a, b = x, y` per 1,000 lines": 1000 * 1 / lines,
        "nested comprehensions per 1,000 lines": 1000 * 1 / lines,
        # RunConfig has one, public has none; _private is not counted.
        "public functions and classes with docstrings, %": 50.0,
        "settings with docstrings, %": 50.0,
        # x, y, rows, c, row
        "one-letter locals, %": 100 * 3 / 7,
    }
    found = {name: figures[name] for name in expected}
    assert found == pytest.approx(expected)


def test_tokens_are_counted_by_line(figures):
    # In the order of the lines: 1, 3, 1, 3, 1, 3, 8, 9, 13, 6, 5, 2.
    assert figures["tokens a line, median"] == 3
    assert figures["tokens a line, 99th percentile"] == 13


def test_it_reports_and_never_fails(text, tmp_path, monkeypatch, capsys):
    (tmp_path / "core").mkdir()
    dense = tmp_path / "core" / "dense.py"
    dense.write_text("a, b = 1, 2\n")
    monkeypatch.setattr(text, "ROOT", tmp_path)
    monkeypatch.setattr(text, "FOLDERS", ("core",))
    assert text.main([]) == 0
    assert text.main([str(dense)]) == 0
    lines = capsys.readouterr().out.splitlines()
    counted = [line.split() for line in lines if "a, b = x, y" in line]
    assert [line[-4:] for line in counted] == [["1000.0", "0.6", "to", "2.1"]] * 2
