"""The source of sums: which there are, and how they are split."""

from __future__ import annotations

import pytest
from helpers.sources import config, read

from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.core.errors import ConfigError
from hybridflow.core.plugins.resolve import load_source


def sums(**options):
    return read(ArithmeticSource(config("arithmetic", **options)))


def test_all_sums_are_split_into_two_sets_without_a_common_row():
    held_out, train, everything = sums(split="held-out"), sums(split="train"), sums(split="all")
    assert len(held_out) == 500
    assert len(train) == 9500
    pairs = [(row["a"], row["b"]) for row in held_out + train]
    assert sorted(pairs) == [(a, b) for a in range(100) for b in range(100)]
    assert everything[17 * 100 + 5] == {"a": 17, "b": 5, "prompt": "17+05=", "answer": "022"}
    for row in everything:
        assert row["prompt"] == f"{row['a']:02d}+{row['b']:02d}="
        assert int(row["answer"]) == row["a"] + row["b"]
        assert len(row["answer"]) == 3


def test_the_split_depends_on_its_seed_alone():
    held_out = sums(split="held-out")
    assert held_out == sums(split="held-out", split_seed=0, held_out=500)
    assert held_out != sums(split="held-out", split_seed=1)
    assert sums(split="held-out", held_out=3) == held_out[:3]


def test_a_split_may_be_cut_to_its_first_rows():
    assert sums(rows=7) == sums()[:7]
    assert len(sums(split="held-out", rows=1_000)) == 500


def test_without_options_a_run_trains_on_all_but_the_held_out_sums():
    assert len(load_source(config("arithmetic"))) == 9500


def test_options_that_make_no_split_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        sums(split="test", held_out=10_000, split_seed=-1, rows=10_001)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "data.options.split",
        "data.options.held_out",
        "data.options.split_seed",
        "data.options.rows",
    ]
