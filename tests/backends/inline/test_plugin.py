"""The runtime for debuggers."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.inline import plugin
from hybridflow.backends.inline.runtime import InlineConfig, InlineRuntime
from hybridflow.core.contracts.capabilities import RuntimeCapabilities


def test_one_runtime_without_processes_that_needs_nothing():
    can = RuntimeCapabilities(processes=False, max_ranks=1)
    check_brought(
        plugin,
        Brought("runtime", "inline", InlineRuntime, config=InlineConfig, capabilities=can),
    )
