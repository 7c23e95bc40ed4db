"""Registers the recorder of runs, and the commands that show them."""

from __future__ import annotations

from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

COMMANDS = {
    "report": (
        "report:ReportCommand",
        "Write one HTML page of runs: curves, samples, times, memory, what is wrong.",
    ),
    "watch": ("watch:WatchCommand", "Show that page of a run while it goes on, in a browser."),
}
"""Name -> where the command is, and its summary."""


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Register each command with its summary; imports none."""
    return [
        Descriptor(
            "command",
            name,
            f"hybridflow.report.commands.{path}",
            capabilities=CommandCapabilities(summary=text),
        )
        for name, (path, text) in COMMANDS.items()
    ]


@hookimpl
def hybridflow_observers(job):
    """Make the recorder of a run, unless it has nothing to do."""
    from hybridflow.report.recorder import RunRecording

    run = job.run
    return [RunRecording(job)] if run.samples or run.timeline_mb or run.report else []
