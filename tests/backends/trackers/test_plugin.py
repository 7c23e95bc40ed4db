"""The trackers that hybridflow brings."""

from __future__ import annotations

import pytest
from helpers.brought import Brought, check_brought

pytest.importorskip("tensorboard")

from hybridflow.backends.trackers import plugin
from hybridflow.backends.trackers.jsonl import JsonlTracker
from hybridflow.backends.trackers.tensorboard import TensorBoardTracker


def test_two_trackers_of_which_one_needs_tensorboard():
    needs = ("tensorboard",)
    check_brought(
        plugin,
        Brought("tracker", "jsonl", JsonlTracker),
        Brought("tracker", "tensorboard", TensorBoardTracker, requires=needs, extra="tensorboard"),
    )
