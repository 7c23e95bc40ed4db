"""The backend that reads weights is brought by its plugin."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.saved import plugin
from hybridflow.backends.saved.backend import SavedBackend


def test_the_backend_is_there_under_its_name():
    check_brought(plugin, saved=SavedBackend)
