"""The environment that agents play in."""

from __future__ import annotations

from helpers.brought import loaded

from hybridflow.backends.agents import plugin
from hybridflow.backends.agents.environment import AgentEnvironment


def test_it_is_brought_under_its_name():
    found = {(d.kind, d.name): loaded(d.factory) for d in plugin.hybridflow_plugins()}
    assert found == {("environment", "agent"): AgentEnvironment}
