"""What the registry knows of DeepSpeed before it is imported."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.deepspeed import plugin
from hybridflow.backends.deepspeed.backend import DeepSpeedBackend


def test_the_backend_is_brought_under_its_name():
    check_brought(plugin, deepspeed=DeepSpeedBackend)
