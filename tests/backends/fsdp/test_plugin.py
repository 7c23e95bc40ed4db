"""The training backend that stands where a configuration names none."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.fsdp import plugin
from hybridflow.backends.fsdp.backend import FSDPBackend


def test_the_backend_is_brought_under_its_name():
    check_brought(plugin, fsdp=FSDPBackend)
