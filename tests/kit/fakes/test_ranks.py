from __future__ import annotations

from helpers import fake_jobs
from helpers.ranks import fresh


def test_one_process_is_a_rank_among_many():
    # tp varies fastest: rank 3 of dp 8, tp 2 is dp 1, tp 1, beside rank 2.
    assert fresh(fake_jobs.ranks) == {
        "world": 16,
        "rank": 3,
        "coords": (1, 1),
        "group": [2, 3],
        "sum": [1.0, 2.0],
        "max": [3.0],
        "ended": True,
    }
