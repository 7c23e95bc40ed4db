"""The runtime that stands where a configuration names none."""

from __future__ import annotations

import pytest
from helpers.brought import check_brought

pytest.importorskip("ray")

from hybridflow.backends.ray import plugin
from hybridflow.backends.ray.runtime import RayRuntime


def test_the_runtime_is_brought_under_its_name():
    check_brought(plugin, ray=RayRuntime)
