"""What the tests of settings share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """Runs would be written below the current folder, and paths to code are found there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
