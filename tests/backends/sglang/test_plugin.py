"""What the registry knows of SGLang before it is imported."""

from __future__ import annotations

import pytest
from helpers.brought import check_brought, loaded

from hybridflow.backends.sglang import plugin
from hybridflow.backends.sglang.diagnosis import diagnose
from hybridflow.backends.sglang.engine import SGLangEngine
from hybridflow.core.errors import PluginError
from hybridflow.core.names import is_installed
from hybridflow.core.plugins import Registry


def test_the_engine_is_brought_under_its_name():
    check_brought(plugin, sglang=SGLangEngine)


def test_the_registry_gives_it_or_says_how_to_install_it():
    registry = Registry()
    registry.register(plugin)
    assert [loaded(question) for _, _, question in registry.diagnoses()] == [diagnose]
    if is_installed("sglang"):
        assert registry.get("rollout_engine", "sglang") is SGLangEngine
    else:
        with pytest.raises(
            PluginError,
            match=r"pip install 'hybridflow\[sglang\]'",
        ):
            registry.get("rollout_engine", "sglang")
