"""The planner's plugins: auto-mapping, and the command that measures a machine for it."""

from __future__ import annotations

from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

CALIBRATE = CommandCapabilities(
    summary="Measure this machine: a cluster file for plan, in under two minutes."
)


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Register the planner and the command `calibrate`; imports neither."""
    return [
        Descriptor("planner", "auto-mapping", "hybridflow.planner.auto:AutoMapping", default=True),
        Descriptor(
            "command",
            "calibrate",
            "hybridflow.planner.calibration.command:CalibrateCommand",
            capabilities=CALIBRATE,
        ),
    ]
