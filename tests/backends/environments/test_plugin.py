"""The environments of other libraries that hybridflow brings."""

from __future__ import annotations

from helpers.brought import loaded

from hybridflow.backends.environments import plugin
from hybridflow.backends.environments.gymnasium import Gymnasium
from hybridflow.backends.environments.reasoning_gym import TaskReward, TaskSource, Tries


def test_worlds_and_tasks_are_brought_under_their_names():
    found = {(d.kind, d.name): loaded(d.factory) for d in plugin.hybridflow_plugins()}
    assert found == {
        ("environment", "gymnasium"): Gymnasium,
        ("data_source", "reasoning_gym"): TaskSource,
        ("reward", "reasoning_gym"): TaskReward,
        ("environment", "reasoning_gym"): Tries,
    }
