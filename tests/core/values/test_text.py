"""Long texts are cut in messages."""

from __future__ import annotations

from hybridflow.core.values.text import shorten


def test_a_short_text_is_its_repr():
    assert shorten("it's\n") == repr("it's\n")
    assert shorten("a" * 80) == repr("a" * 80)


def test_a_long_text_keeps_its_ends():
    assert shorten("a" * 50 + "b" * 50) == repr("a" * 40 + " ... " + "b" * 40)
    assert shorten("abcdefgh", 4) == "'ab ... gh'"
