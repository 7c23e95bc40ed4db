"""The rollout engine that stands where a configuration names none."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.transformers import plugin
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.capabilities import EngineCapabilities


def test_the_default_engine_sleeps_anywhere_and_takes_weights_while_sequences_run():
    can = EngineCapabilities(
        tp=True,
        process="either",
    )
    check_brought(
        plugin,
        Brought(
            "rollout_engine",
            "transformers",
            TransformersEngine,
            config=TransformersEngineConfig,
            requires=("transformers",),
            extra="transformers",
            default=True,
            capabilities=can,
        ),
    )
