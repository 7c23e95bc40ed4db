"""The training backend that stands where a configuration names none."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.fsdp import plugin
from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.capabilities import TrainingCapabilities


def test_the_default_training_backend_cuts_dp_and_tp():
    can = TrainingCapabilities(
        axes=frozenset({"dp", "tp"}),
    )
    check_brought(
        plugin,
        Brought(
            "training_backend",
            "fsdp",
            FSDPBackend,
            config=FSDPConfig,
            requires=("transformers", "safetensors"),
            extra="fsdp",
            default=True,
            capabilities=can,
        ),
    )
