"""What tests of the calibration share.

quick  smaller models and fewer calls.
"""

from __future__ import annotations

import pytest

from hybridflow.planner.calibration import calibrate


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(calibrate.SHAPES, "cpu", {"small": (128, 2, 64), "deep": (256, 2, 64)})
    monkeypatch.setitem(calibrate.LENGTHS, "cpu", ((2, 4, 4), (8, 8, 8)))
