"""What the registry knows of DeepSpeed before it is imported."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.deepspeed import plugin
from hybridflow.backends.deepspeed.backend import DeepSpeedBackend
from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.core.contracts.capabilities import TrainingCapabilities


def test_it_spreads_over_data_alone_and_trains_adapters():
    can = TrainingCapabilities(
        axes=frozenset({"dp"})
    )  # fmt: skip
    needs = ("deepspeed", "transformers", "safetensors")
    expected = {
        "config": DeepSpeedConfig,
        "requires": needs,
        "extra": "deepspeed",
        "capabilities": can,
    }
    check_brought(plugin, Brought("training_backend", "deepspeed", DeepSpeedBackend, **expected))
