"""What the registry knows of vLLM before it is imported."""

from __future__ import annotations

import pytest
from helpers.brought import check_brought, loaded

from hybridflow.backends.vllm import plugin
from hybridflow.backends.vllm.diagnosis import diagnose
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.errors import PluginError
from hybridflow.core.names import is_installed
from hybridflow.core.plugins import Registry


def test_the_engine_is_brought_under_its_name():
    check_brought(plugin, vllm=VLLMEngine)


def test_where_it_is_missing_the_remedy_and_the_doctors_question_are_there():
    registry = Registry()
    registry.register(plugin)
    [(_, _, question)] = registry.diagnoses()
    assert loaded(question) is diagnose
    if is_installed("vllm"):
        assert registry.get("rollout_engine", "vllm") is VLLMEngine
        return
    with pytest.raises(PluginError, match=r"pip install 'hybridflow\[vllm\]'"):
        registry.get("rollout_engine", "vllm")
