"""The runtime for debuggers."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.inline import plugin
from hybridflow.backends.inline.runtime import InlineRuntime


def test_the_runtime_is_brought_under_its_name():
    check_brought(plugin, inline=InlineRuntime)
