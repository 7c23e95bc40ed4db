"""The examples that need no download are checked as a run checks them before it starts."""

from __future__ import annotations

import pytest
from helpers.paths import ROOT

from hybridflow.core.running.session import prepare_all
from hybridflow.settle.launch import load_config


@pytest.mark.parametrize(
    "name", ["arithmetic", "calculator_tool", "maze", "frozen_lake", "spelling", "debate", "coding"]
)
def test_its_settings_and_the_first_rows_of_its_data_fit(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    jobs = load_config(ROOT / f"examples/{name}.toml")
    assert len(prepare_all(jobs)) == len(jobs)
