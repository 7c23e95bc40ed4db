"""What the registry knows of Megatron before it is imported."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.megatron import plugin
from hybridflow.backends.megatron.backend import MegatronBackend
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.contracts.capabilities import TrainingCapabilities


def test_it_cuts_tensors_and_pipelines_and_has_no_adapters():
    axes = frozenset({"dp", "tp", "pp"})
    can = TrainingCapabilities(axes=axes)
    expected = Brought(
        "training_backend",
        "megatron",
        MegatronBackend,
        config=MegatronConfig,
        requires=("megatron.core", "transformers", "safetensors"),
        extra="megatron",
        capabilities=can,
    )
    check_brought(plugin, expected)
