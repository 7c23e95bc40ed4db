"""The rollout engine that stands where a configuration names none."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.transformers import plugin
from hybridflow.backends.transformers.engine import TransformersEngine


def test_the_engine_is_brought_under_its_name():
    check_brought(plugin, transformers=TransformersEngine)
