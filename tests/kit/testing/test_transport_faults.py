"""The transport kit finds planted faults."""

import sys

import pytest
from helpers.paths import TESTS

from hybridflow.kit.testing import TransportConformance

sys.path.insert(0, str(TESTS))  # the ranks import the faults by name

FAULTS = {
    "Truncates": "arrived wrong",
    "ForgetsFiles": "left in the folder",
    "ReusesItsBuffer": "arrived wrong",
    "Unwilling": "cannot serve one node",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_transport_fails_the_kit(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    kit = TransportConformance()
    kit.folder_setting = "folder"
    moved = TransportConformance.moved.__wrapped__ if hasattr(TransportConformance.moved, "__wrapped__") else None
    assert moved is not None
    found = moved(kit, f"helpers.transport_faults:{fault}", tmp_path)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        kit.test_every_layout_arrives_bit_for_bit_again_and_again_and_nothing_is_left_behind(found)
