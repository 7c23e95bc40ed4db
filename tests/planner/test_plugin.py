"""What the planner brings: auto-mapping, the default, and the command calibrate."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.planner import plugin
from hybridflow.planner.auto import AutoMapping
from hybridflow.planner.calibration.command import CalibrateCommand


def test_a_planner_and_a_command():
    summary = "Measure this machine: a cluster file for plan, in under two minutes."
    check_brought(
        plugin,
        Brought("planner", "auto-mapping", AutoMapping, default=True),
        Brought(
            "command",
            "calibrate",
            CalibrateCommand,
            capabilities=CommandCapabilities(summary=summary),
        ),
    )
