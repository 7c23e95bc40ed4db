"""The runtime that stands where a configuration names none."""

from __future__ import annotations

import pytest
from helpers.brought import Brought, check_brought

pytest.importorskip("ray")

from hybridflow.backends.ray import plugin
from hybridflow.backends.ray.config import RayConfig
from hybridflow.backends.ray.runtime import RayRuntime
from hybridflow.core.contracts.capabilities import RuntimeCapabilities


def test_the_default_runtime_spans_clusters_and_needs_ray():
    check_brought(
        plugin,
        Brought(
            "runtime",
            "ray",
            RayRuntime,
            config=RayConfig,
            requires=("ray",),
            extra="ray",
            default=True,
            capabilities=RuntimeCapabilities(cluster=True),
        ),
    )
