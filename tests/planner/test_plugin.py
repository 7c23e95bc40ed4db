"""What the planner brings: auto-mapping, the default, and the command calibrate."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.planner import plugin
from hybridflow.planner.auto import AutoMapping
from hybridflow.planner.calibration.command import CalibrateCommand


def test_a_planner_and_a_command():
    check_brought(plugin, **{"auto-mapping": AutoMapping}, calibrate=CalibrateCommand)
