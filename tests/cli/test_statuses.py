"""Exit statuses: what may be tried again has one of its own."""

from __future__ import annotations

import pytest

from hybridflow.cli.statuses import status_of
from hybridflow.core.errors import ConfigError, DataError, HangError, WorkerDied, WorkerError

PLACE = {"role": "actor", "phase": "update", "rank": 1}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkerDied("rank 1 is gone", **PLACE), 75),
        (HangError("rank 1 stands still"), 75),
        (WorkerError("it raised", **PLACE), 1),
        (ConfigError("wrong"), 1),
        (DataError("empty"), 1),
    ],
)
def test_what_has_died_or_stood_still_may_be_tried_again(error, status):
    assert status_of(error) == status
