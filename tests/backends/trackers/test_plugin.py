"""The trackers that hybridflow brings."""

from __future__ import annotations

import pytest
from helpers.brought import loaded

pytest.importorskip("tensorboard")

from hybridflow.backends.trackers import plugin
from hybridflow.backends.trackers.jsonl import JsonlTracker
from hybridflow.backends.trackers.tensorboard import TensorBoardTracker

SERVICES = {
    "wandb": "WandbConfig",
    "mlflow": "MLflowConfig",
    "trackio": "TrackioConfig",
    "swanlab": "SwanLabConfig",
}


def test_trackers_are_brought_under_their_names():
    brought = {one.name: one for one in plugin.hybridflow_plugins()}
    assert list(brought) == ["jsonl", "tensorboard", *SERVICES]
    assert loaded(brought["jsonl"].factory) is JsonlTracker
    assert loaded(brought["tensorboard"].factory) is TensorBoardTracker


def test_settings_of_services_can_be_read_without_their_packages():
    for one in plugin.hybridflow_plugins():
        if one.name not in SERVICES:
            continue
        config = loaded(one.config)
        assert config.__name__ == SERVICES[one.name] and config().project == "hybridflow"
        assert one.requires == (one.name,) and one.extra == one.name
        # tests/trackers has the trackers themselves
        assert one.factory.startswith(f"hybridflow.backends.trackers.{one.name}:")
