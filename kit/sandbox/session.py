"""A sandbox for commands one after the other, an agent's for one, with files that stay."""

from __future__ import annotations

import base64
import os
import posixpath
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hybridflow.kit.sandbox.jail import DOOR, SYSTEM
from hybridflow.kit.sandbox.process import Limits, ProgramOutcome, SandboxError, give_back, take
from hybridflow.kit.sandbox.programs import python

DOOR_URL = "http://{}:{}".format(*DOOR)
"""The address of a sandbox's door, inside."""
HOME = "/tmp"
"""The folder in which commands begin, and the one that they may write to."""
LIMITS = Limits(seconds=60.0, memory_mb=1_000, disk_mb=64, processes=32)
"""Limits of a sandbox that is given none."""
TAKEN = (*(f"/{name}" for name in SYSTEM), "/dev", "/old", HOME, os.path.realpath(sys.base_prefix))
"""Folders that a sandbox has already."""
OWN = Limits(seconds=10.0, output_bytes=2**28)
"""Limits of the programs that write and read files here; the sandbox's of its disk holds too."""
WRITE = """
import os, shutil, sys
os.makedirs(os.path.dirname({0!r}), exist_ok=True)
if os.path.isdir({0!r}) and not os.path.islink({0!r}):
    shutil.rmtree({0!r})
elif os.path.lexists({0!r}):
    os.unlink({0!r})
with open({0!r}, "xb") as file:
    file.write(sys.stdin.buffer.read())
"""
READ = """
import base64, sys
with open({0!r}, "rb") as file:
    sys.stdout.write(base64.b64encode(file.read()).decode())
"""


class Sandbox:
    """A place in which programs run isolated, with files that stay until it is closed.

    When a command ends, so does everything that it has started; its files stay. Use it in a `with`
    statement, or close it.
    """

    def __init__(
        self,
        folders: Mapping[str, str | os.PathLike[str]] | None = None,
        limits: Limits = LIMITS,
        variables: Mapping[str, str] | None = None,
        serve: Callable[[socket.socket], Callable[[], object]] | None = None,
    ):
        """Make it.

        folders: folders of this machine, by the paths at which programs may read them.
        limits: of each command, and `disk_mb` of all files. variables: environment variables.
        serve: takes the sandbox's one door, a socket that listens at DOOR_URL inside, and returns
        what ends that. Raises SandboxError where a folder cannot be shown. Where this machine
        cannot isolate programs, so do all methods, and with a door this one, and then for good.
        """
        shown = _shown(folders or {})
        self.limits = limits
        self.variables = dict(variables or {})
        self._jail = take()
        self._one = threading.Lock()
        """Held by a command that runs, for the next to wait."""
        self._state = threading.Lock()
        self._running = False
        self._closed = False
        self._end_door: Callable[[], object] | None = None
        try:
            self._jail.begin(shown, door=serve is not None)
            if serve is not None:  # the first program makes the place, and its door
                made = attrs.evolve(OWN, disk_mb=limits.disk_mb)
                _, door = self._jail.run(python("pass"), "", made)
                assert door is not None
                self._end_door = serve(door)
        except BaseException as error:
            self._jail.close()
            if isinstance(error, OSError):
                raise SandboxError(f"a sandbox has ended: {error}") from error
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and forget all files; safe to call twice, by any thread."""
        with self._state:
            closed, self._closed = self._closed, True
            running = self._running
        if closed:
            return
        if self._end_door is not None:
            self._end_door()
        if running:
            self._jail.stop()
        else:
            give_back(self._jail)

    def run(
        self,
        command: Sequence[str],
        given: str | bytes = "",
        seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> ProgramOutcome:
        """Run a command in HOME, and wait for its end.

        command: the program, found by PATH, and its arguments; no shell reads them. given: its
        standard input. seconds: its limit of time, in the place of `limits.seconds`. variables:
        further environment variables. Raises SandboxError where the sandbox is closed.
        """
        if isinstance(command, str) or not command:
            raise SandboxError(
                f'a command is a list of texts, ["sh", "-c", "..."] for one; got {command!r:.80}'
            )
        program = {
            "command": [str(word) for word in command],
            "variables": {
                name: str(value) for name, value in {**self.variables, **(variables or {})}.items()
            },
        }
        return self._run(program, given, self._limits(seconds))

    def python(
        self, program: str, given: str | bytes = "", seconds: float | None = None
    ) -> ProgramOutcome:
        """Run Python text in HOME, as run(["python3", FILE]) in a fifth of the time."""
        text = python(program, f"{HOME}/.program.py")
        return self._run(text, given, self._limits(seconds))

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file, in the place of what is there; a relative path is one in HOME.

        Raises SandboxError where it cannot be written, for what a command has left, for one.
        """
        self._own(WRITE.format(posixpath.join(HOME, path)), f"write {path!r}", content)

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises SandboxError where it cannot be read."""
        return base64.b64decode(
            self._own(READ.format(posixpath.join(HOME, path)), f"read {path!r}")
        )

    def _limits(self, seconds: float | None) -> Limits:
        """Return the limits of a command, which may have another limit of time."""
        return self.limits if seconds is None else attrs.evolve(self.limits, seconds=seconds)

    def _own(self, program: str, what: str, given: str | bytes = "") -> str:
        outcome = self._run(python(program), given, attrs.evolve(OWN, disk_mb=self.limits.disk_mb))
        if not outcome.good:
            why = outcome.errors.strip().rpartition("\n")[2] or outcome.reason
            raise SandboxError(f"the sandbox cannot {what}: {why}")
        return outcome.output

    def _run(
        self, program: Mapping[str, Any], given: str | bytes, limits: Limits
    ) -> ProgramOutcome:
        with self._one:
            with self._state:
                if self._closed:
                    raise SandboxError("the sandbox is closed")
                self._running = True
            try:
                return self._jail.run(program, given, limits)[0]
            except SandboxError:
                raise
            except BaseException as error:
                self._jail.stop()  # the command may still run
                if isinstance(error, OSError):
                    said = "the sandbox was closed, or killed, in a command"
                    raise SandboxError(said) from error
                raise
            finally:
                with self._state:
                    self._running = False
                    closed = self._closed
                if closed:
                    self._jail.close()


def _shown(folders: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """Return the folders to show, by the paths inside. Raises SandboxError for one that cannot."""
    shown: dict[str, str] = {}
    for inside, outside in folders.items():
        straight = re.fullmatch("(/[^/]+)+", inside) and posixpath.normpath(inside) == inside
        if not straight or any(_within(inside, other) for other in (*TAKEN, *shown)):
            raise SandboxError(
                f"a sandbox cannot show a folder at {inside!r}: give an absolute path such as "
                f"'/agent', apart from {', '.join((*TAKEN, *shown))}"
            )
        folder = Path(outside).expanduser().resolve()
        if not folder.is_dir():
            raise SandboxError(
                f"a sandbox is to show {str(outside)!r} at {inside}: it is no folder"
            )
        shown[inside] = str(folder)
    return shown


def _within(one: str, other: str) -> bool:
    """Whether a path is the other one, in it, or has it in itself."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
