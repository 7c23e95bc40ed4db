from __future__ import annotations

from helpers import fake_jobs
from helpers.ranks import fresh


def test_storages_count_once_while_they_live_and_as_large_as_they_are():
    assert fresh(fake_jobs.memory) == {
        "two": 8000,
        "view": 8000,  # a view has no memory of its own
        "one": 4000,
        "peak": 8000,
        "restarted": 4000,
        "resized": 0,
        "again": 4000,
        "largest": 4000,
        "arrived": 40,  # ten float32
        "left": 4000,
    }
