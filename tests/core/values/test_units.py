"""Figures for readers, written by hand."""

from __future__ import annotations

import pytest

from hybridflow.core.values.units import amount, seconds


@pytest.mark.parametrize(
    "nbytes, words",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_500_000, "1.50 MB"),
        (2.345e9, "2.35 GB"),
        (4e13, "40.00 TB"),
        (-2000, "-2.00 kB"),
    ],
)
def test_bytes_have_decimal_units(nbytes, words):
    assert amount(nbytes) == words


@pytest.mark.parametrize(
    "value, words",
    [
        (123.44, "123.4 s"),
        (10, "10.0 s"),
        (9.5, "9.50 s"),
        (0.1, "0.10 s"),
        (0.0078, "7.8 ms"),
        (0, "0.0 ms"),
    ],
)
def test_seconds_have_the_digits_that_matter(value, words):
    assert seconds(value) == words
