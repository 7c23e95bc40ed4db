"""`hybridflow plugins`: lists the plugins, and how to make ready those that are not.

It imports neither a plugin nor torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import attrs
from rich.console import Console

from hybridflow.core.contracts.capabilities import Capabilities
from hybridflow.core.contracts.command import Command
from hybridflow.core.plugins import KINDS, Entry, registry
from hybridflow.core.plugins.descriptor import check_kind
from hybridflow.kit.console import make_console, print_line, print_table


class PluginsCommand(Command):
    """Prints a table of the plugins that are installed, and why some cannot be used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", nargs="?", help="only this kind")
        parser.add_argument("--capabilities", action="store_true", help="show what each can do")

    def run(self, arguments: argparse.Namespace) -> int:
        list_plugins(arguments.kind, arguments.capabilities)
        return 0


def list_plugins(
    kind: str | None = None, capabilities: bool = False, console: Console | None = None
) -> None:
    """Print a table of the plugins, of one kind or of all, then why some failed.

    Raises PluginError for an unknown kind.
    """
    if kind is not None:
        check_kind(kind)
    console = console or make_console()

    entries = registry().entries()
    shown = [entry for entry in entries if kind in (None, entry.kind) and entry.kind in KINDS]
    rows = []
    for entry in shown:
        state, remedy = state_of(entry)
        rows.append((entry.kind, entry.name, entry.package, entry.version, state, remedy))
    if rows:
        print_table(console, ("kind", "name", "package", "version", "state", "remedy"), rows)
    else:
        print_line(console, f"there is no plugin of kind {kind}" if kind else "there is no plugin")

    # Most kinds of plugins state no capabilities.
    able = [
        (entry.kind, entry.name, spell(entry.capabilities))
        for entry in shown
        if entry.capabilities is not None
    ]
    if capabilities and able:
        print_line(console)
        print_table(console, ("kind", "name", "can do"), able)

    # Modules of plugins that could not be read are of no kind, and always shown.
    print_failed(
        console,
        [entry for entry in entries if kind in (None, entry.kind) or entry.kind == "module"],
    )


def state_of(entry: Entry) -> tuple[str, str]:
    """Return the state and the remedy of a plugin for its row of the table."""
    if entry.state.startswith("failed"):
        return "failed", "see below"
    return entry.state, entry.remedy


def print_failed(console: Console, entries: Sequence[Entry]) -> None:
    """Print the reason and the remedy of each plugin that failed."""
    for entry in entries:
        if entry.state.startswith("failed"):
            what = "module of" if entry.kind == "module" else entry.kind
            print_line(console)
            print_line(console, f"{what} {entry.name} ({entry.owner}) failed", "bold red")
            print_line(console, f"  reason: {entry.state.removeprefix('failed: ')}")
            print_line(console, f"  remedy: {entry.remedy}")


def spell(capabilities: Capabilities | None) -> str:
    """Return a plugin's capabilities in a line, such as "abort; devices: cpu, cuda"."""
    if capabilities is None:
        return ""
    # False, None and empty sets, the capabilities that it lacks, are left out.
    words = []
    for field in attrs.fields(type(capabilities)):
        value = getattr(capabilities, field.name)
        if value is True:
            words.append(field.name)
        elif isinstance(value, frozenset) and value:
            words.append(f"{field.name}: {', '.join(sorted(value))}")
        elif value is not None and not isinstance(value, bool | frozenset):
            words.append(f"{field.name}: {value}")
    return "; ".join(words)
