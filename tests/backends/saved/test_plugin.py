"""The backend that reads weights is brought by its plugin."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.saved import plugin
from hybridflow.backends.saved.backend import SavedBackend
from hybridflow.backends.saved.config import SavedConfig
from hybridflow.core.contracts.capabilities import TrainingCapabilities


def test_the_backend_is_there_under_its_name():
    check_brought(
        plugin,
        Brought(
            "training_backend",
            "saved",
            SavedBackend,
            config=SavedConfig,
            requires=("transformers", "safetensors"),
            extra="transformers",
            capabilities=TrainingCapabilities(models=frozenset({"policy"})),
        ),
    )
