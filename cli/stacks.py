"""`hybridflow stacks`: says what each process of a run does now, and where its threads are.

It reads the pages that the processes keep (core/processes), and asks for nothing that a process
which hangs could not give. It imports no torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.core.contracts.command import Command
from hybridflow.core.errors import ConfigError
from hybridflow.core.processes.look import (
    Look,
    Thread,
    can_spy,
    descendants,
    here,
    looks,
    spied,
    state_of,
)
from hybridflow.core.values.files import PROCESSES
from hybridflow.kit.console import make_console, print_line

FOREIGN = "the "
"""Beginning of the names of processes that are no Python of ours, such as a runtime's services."""


class StacksCommand(Command):
    """A plugin of kind "command", name "stacks"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=Path, help="the folder of a run that goes on")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print every process of a run with its stacks; return 0."""
        console = make_console()
        for line in stacks(arguments.run):
            print_line(console, line)
        return 0


def stacks(folder: Path) -> Iterator[str]:
    """Yield the lines about a run's processes. Raises ConfigError where there are none."""
    # A run with stages has a folder for each.
    places = [folder / PROCESSES, *sorted(folder.glob(f"*/{PROCESSES}"))]
    found = [look for place in places for look in looks(place, stacks=True)]
    if not found:
        raise ConfigError(
            f"{folder}: no process of a run says here what it does; a run does while it goes on: "
            "give its folder (hybridflow runs lists them)"
        )
    known = {look.pid for look in found}
    for look in sorted(found, key=lambda look: (look.name != "controller", look.name)):
        yield from _process(look)
        if look.host == here() and look.state != "gone":
            yield from _children(look, known)
        yield ""


def _process(look: Look) -> Iterator[str]:
    """Yield what a process does, and the stacks of its threads."""
    if look.host != here():
        yield f"{look.where}: it is on another machine; run this there too"
        return
    state = look.state or ("at work" if look.notes else "idle")
    moved = f", last moved {look.still_s:.0f} s ago" if look.notes else ""
    yield f"{look.where}: {state}{moved}"
    for note in look.notes:
        limit = "" if math.isinf(note.left_s) else f", at most {max(note.left_s, 0):.0f} s more"
        yield f"  {note.text}, for {note.seconds:.0f} s{limit}"
    if look.state == "gone" or look.name.startswith(FOREIGN):
        return
    if look.threads:
        for thread in reversed(look.threads):
            yield from _thread(thread, look.notes[-1].text if look.notes else "", look)
    elif text := spied(look.pid):
        yield from (f"    {line}" for line in text.splitlines())
    else:
        yield f"    no stacks: {_why(look)}"


def _thread(thread: Thread, text: str, look: Look) -> Iterator[str]:
    """Yield a stack, the innermost call first."""
    is_its = bool(look.notes) and thread.ident == look.notes[-1].thread
    yield f"    thread {thread.ident:#x}" + (f", at {text}" if is_its else "")
    for frame in thread.frames:
        yield f"      {frame}"


def _why(look: Look) -> str:
    """Return why there are no stacks of a process, and what would help."""
    why = "it does not answer"
    if look.state:
        why = f"it is {look.state}, and writes them when it goes on"
    return why if can_spy() else f"{why}; py-spy (pip install py-spy) may look from outside"


def _children(look: Look, known: Sequence[int] | set[int]) -> Iterator[str]:
    """Yield the processes that one has started, which keep no pages."""
    # Those of the runtime's own services are many, and say nothing.
    quiet = look.name == "controller" or look.name.startswith(FOREIGN)
    for pid, command in descendants(look.pid):
        state = state_of(pid)
        if pid in known or (quiet and not state):
            continue
        yield f"  started pid {pid}{f' ({state})' if state else ''}: {command[:100]}"
        yield from (f"    {line}" for line in spied(pid).splitlines())
