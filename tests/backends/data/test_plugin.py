"""The data sources that hybridflow brings."""

from __future__ import annotations

import subprocess
import sys

from helpers.brought import check_brought

from hybridflow.backends.data import plugin
from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.backends.data.hf_datasets import DatasetsSource
from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.backends.data.parquet import ParquetSource


def test_four_sources_are_brought_under_their_names():
    check_brought(
        plugin,
        jsonl=JsonlSource,
        parquet=ParquetSource,
        datasets=DatasetsSource,
        arithmetic=ArithmeticSource,
    )


def test_listing_the_built_in_plugins_imports_nothing_heavy():
    code = (
        "import sys, hybridflow.backends.data.plugin, hybridflow.backends.rewards.plugin\n"
        "bad = {'torch', 'datasets', 'pyarrow', 'math_verify', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
