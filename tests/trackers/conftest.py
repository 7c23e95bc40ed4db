"""Trackers of services, offline, by their real packages: `make test-trackers` runs them in an environment of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items) -> None:
    if "HYBRIDFLOW_TRACKERS" not in os.environ:
        skip = pytest.mark.skip(reason="make test-trackers runs it")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)
