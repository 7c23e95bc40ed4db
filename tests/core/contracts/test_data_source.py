"""A source's own options, checked against its defaults."""

from __future__ import annotations

import pytest
from helpers.sources import ListSource

from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.errors import ConfigError


def options(given, **defaults):
    return ListSource(DataConfig(source="mine", options=given), []).read_options(**defaults)


def test_options_that_are_given_replace_the_defaults():
    assert options({"n": 4}, split="x", n=1) == {"split": "x", "n": 4}
    assert options({}, split="x") == {"split": "x"}


def test_all_options_of_another_name_or_type_are_reported():
    with pytest.raises(ConfigError) as caught:
        options({"splitt": "a", "n": "3", "twice": 1}, split="train", n=1, twice=False)
    unknown, number, flag = caught.value.problems
    assert "'splitt'; did you mean 'split'?" in unknown
    assert number.startswith("data.options.n of ") and flag.startswith("data.options.twice of ")


def test_an_option_whose_default_is_none_takes_any_type():
    assert options({"seed": 3}, seed=None) == {"seed": 3}
    assert options({"seed": "x"}, seed=None) == {"seed": "x"}


def test_a_source_without_options_says_so():
    with pytest.raises(ConfigError, match=r"has no option 'n' \(options: none\)"):
        options({"n": 1})


def test_limits_and_seeds_below_zero_are_refused():
    for name in ("max_prompt_tokens", "limit", "seed"):
        with pytest.raises(ValueError, match=f"^{name}: must be 0 or more, got -1"):
            DataConfig(**{name: -1})
