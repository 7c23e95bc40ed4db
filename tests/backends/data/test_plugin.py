"""The data sources that hybridflow brings."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.data import plugin
from hybridflow.backends.data.arithmetic import ArithmeticSource
from hybridflow.backends.data.hf_datasets import DatasetsSource
from hybridflow.backends.data.jsonl import JsonlSource
from hybridflow.backends.data.parquet import ParquetSource
from hybridflow.backends.data.seeds import SeedSource


def test_five_sources_are_brought_under_their_names():
    check_brought(
        plugin,
        jsonl=JsonlSource,
        parquet=ParquetSource,
        datasets=DatasetsSource,
        arithmetic=ArithmeticSource,
        seeds=SeedSource,
    )
