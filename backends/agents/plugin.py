"""Registers the environment that agents play in."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Return the descriptor; nothing is imported."""
    agent = "hybridflow.backends.agents.environment:AgentEnvironment"
    return [Descriptor("environment", "agent", agent)]
