"""The source of seeds."""

from __future__ import annotations

import pytest
from helpers.sources import config, read

from hybridflow.backends.data.seeds import SeedSource
from hybridflow.core.errors import ConfigError
from hybridflow.kit.testing import DataSourceConformance


def rows(**options):
    return read(SeedSource(config("seeds", **options)))


class TestSeeds(DataSourceConformance):
    @pytest.fixture
    def open_source(self):
        return lambda: SeedSource(config("seeds"))


def test_each_row_has_a_seed_of_its_own_and_the_first_are_held_out():
    held_out, train = rows(rows=7, held_out=3, split="held-out"), rows(rows=7, held_out=3)
    assert [row["seed"] for row in held_out + train] == list(range(7)) and len(train) == 4
    assert held_out[0] == {"prompt": "go", "seed": 0, "answer": ""}
    assert rows(rows=2, held_out=1, prompt="Play!")[0]["prompt"] == "Play!"


def test_wrong_options_are_said_together():
    with pytest.raises(ConfigError) as caught:
        rows(split="test", rows=5, held_out=5)
    assert "options.split is 'test'" in str(caught.value)
    assert "options.held_out is 5; it must be 1 to 4 of 5" in str(caught.value)
