"""Registers the built-in data sources."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Describe the data sources; none of their libraries is imported."""
    here = "hybridflow.backends.data"

    return [
        Descriptor("data_source", "jsonl", f"{here}.jsonl:JsonlSource"),
        Descriptor(
            "data_source",
            "parquet",
            f"{here}.parquet:ParquetSource",
            requires=("pyarrow",),
            extra="data",
        ),
        Descriptor(
            "data_source",
            "datasets",
            f"{here}.hf_datasets:DatasetsSource",
            requires=("datasets",),
            extra="data",
        ),
        Descriptor("data_source", "arithmetic", f"{here}.arithmetic:ArithmeticSource"),
        Descriptor("data_source", "seeds", f"{here}.seeds:SeedSource"),
    ]
