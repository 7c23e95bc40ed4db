"""The trackers that hybridflow brings."""

from __future__ import annotations

import pytest
from helpers.brought import check_brought

pytest.importorskip("tensorboard")

from hybridflow.backends.trackers import plugin
from hybridflow.backends.trackers.jsonl import JsonlTracker
from hybridflow.backends.trackers.tensorboard import TensorBoardTracker


def test_two_trackers_are_brought_under_their_names():
    check_brought(plugin, jsonl=JsonlTracker, tensorboard=TensorBoardTracker)
