"""What the registry knows of Megatron before it is imported."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.megatron import plugin
from hybridflow.backends.megatron.backend import MegatronBackend


def test_the_backend_is_brought_under_its_name():
    check_brought(plugin, megatron=MegatronBackend)
