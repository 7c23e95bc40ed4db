"""The data sources that hybridflow brings."""

from __future__ import annotations

import subprocess
import sys

from helpers.brought import Brought, check_brought

from hybridflow.backends.data import plugin
from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.backends.data.hf_datasets import DatasetsSource
from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.backends.data.parquet import ParquetSource
from hybridflow.core.plugins import registry


def test_four_sources_of_which_two_need_the_extra_data():
    check_brought(
        plugin,
        Brought("data_source", "jsonl", JsonlSource),
        Brought("data_source", "parquet", ParquetSource, requires=("pyarrow",), extra="data"),
        Brought("data_source", "datasets", DatasetsSource, requires=("datasets",), extra="data"),
        Brought("data_source", "arithmetic", ArithmeticSource),
    )


def test_the_registry_finds_each_by_its_name():
    sources = {
        "jsonl": JsonlSource,
        "parquet": ParquetSource,
        "datasets": DatasetsSource,
        "arithmetic": ArithmeticSource,
    }
    for name, source in sources.items():
        assert registry().get("data_source", name) is source


def test_listing_the_built_in_plugins_imports_nothing_heavy():
    code = (
        "import sys, hybridflow.backends.data.plugin, hybridflow.backends.rewards.plugin\n"
        "bad = {'torch', 'datasets', 'pyarrow', 'math_verify', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
