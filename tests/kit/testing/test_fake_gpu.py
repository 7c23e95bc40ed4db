"""The suite itself is seen to fail in tests/fake/test_faults.py; here, that it runs a whole life."""

from __future__ import annotations

from helpers import fake_jobs
from helpers.paths import matrix
from helpers.ranks import fresh


@matrix
def test_a_case_lives_through_all_phases():
    record = fresh(fake_jobs.case, fake_jobs.reference_folder())
    assert list(record.phases) == [
        "build", "one", "one: step", "several", "several: step", "sync", "away", "forward: onload", "forward",
        "forward: offload", "update: onload", "update", "update: step", "update: offload", "back", "disk: save", "disk: load",
    ]  # fmt: skip
    # A forward pass needs weights (4 bytes of a parameter), an update moments too (8 more).
    weights = record.phases["forward: onload"].arrived
    assert 4 * record.held <= weights < 4 * record.held + 500
    assert record.phases["forward: offload"].left == 0
    assert 12 * record.held <= record.phases["update: onload"].arrived < 12 * record.held + 1000
