"""The plugins of the command line: the commands of `hybridflow` itself."""

from __future__ import annotations

from hybridflow.core.contracts.capabilities import CommandCapabilities
from hybridflow.core.plugins import Descriptor, hookimpl

COMMANDS = {
    "run": ("run:RunCommand", "Run a config: all stages, to the end."),
    "fork": (
        "fork:ForkCommand",
        "Begin a run at a checkpoint of another one, with other settings.",
    ),
    "runs": ("runs:RunsCommand", "List runs, compare what differs, delete them."),
    "stacks": (
        "stacks:StacksCommand",
        "Say what each process of a run does now, since when, and print the stacks of its threads.",
    ),
    "sweep": (
        "sweep:SweepCommand",
        "Run a config with every combination of some settings, and print one table.",
    ),
    "plan": (
        "plan:PlanCommand",
        "Say where everything goes, how long a step takes and whether it fits, before it runs.",
    ),
    "show": (
        "show:ShowCommand",
        "Print every resolved value of a config with where it came from, and what follows from it.",
    ),
    "reshard": (
        "reshard:ReshardCommand",
        "Say what it costs to bring weights from a training layout to a rollout layout.",
    ),
    "plugins": (
        "plugins:PluginsCommand",
        "List plugins: kind, name, package, version, capabilities, state.",
    ),
    "new": (
        "new.command:NewCommand",
        "Write a package of your own that passes its tests as it is.",
    ),
    "doctor": (
        "doctor:DoctorCommand",
        "Say what is installed, what works on this machine, and what each plugin still needs.",
    ),
}
"""Name -> where the command is, and its summary."""


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Register each command with its summary; imports none."""
    return [
        Descriptor(
            "command",
            name,
            f"hybridflow.cli.{path}",
            capabilities=CommandCapabilities(summary=text),
        )
        for name, (path, text) in COMMANDS.items()
    ]
