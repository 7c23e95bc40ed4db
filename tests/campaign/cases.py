"""What a case of the campaign is: items that are drawn by its name, and what came of doing them."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
from helpers.shared_memory import in_shared_memory

ROOT = Path(__file__).parents[2]
ANSWER = "answer "
"""Begins the line with which a case's process tells what came of it."""
LEFT_S = 30.0
"""Seconds after its end within which all that a case has started must be gone."""


@attrs.define
class Result:
    """What came of a case."""

    counts: Counter[str] = attrs.field(factory=Counter)
    """What was done, by kind -> how often."""
    problems: list[str] = attrs.field(factory=list)
    """What should not be; empty: nothing was found."""
    back_s: dict[str, float] = attrs.field(factory=dict)
    """What was done -> the longest time after which the run had made another step."""

    def problem(self, text: str) -> None:
        self.problems.append(text)


class Part(Protocol):
    """A kind of cases."""

    name: str

    def draw(self, draws: random.Random) -> list[Any]:
        """The items of a case, each of which may be left out."""

    def do(self, items: Sequence[Any], folder: Path) -> Result:
        """Do them, or some of them, in an empty folder; `draw` was called before."""


@attrs.frozen
class Case:
    """A case by its name, such as "runs-0-17", with some of its items: "runs-0-17:2,5"."""

    part: str
    seed: int
    number: int
    only: tuple[int, ...] | None = None
    """The places of the items that are done; None: all."""

    @classmethod
    def named(cls, name: str) -> Case:
        head, _, places = name.partition(":")
        part, seed, number = head.rsplit("-", 2)
        only = tuple(int(place) for place in places.split(",")) if places else None
        return cls(part, int(seed), int(number), only)

    @property
    def name(self) -> str:
        places = "" if self.only is None else ":" + ",".join(map(str, self.only))
        return f"{self.part}-{self.seed}-{self.number}{places}"

    def drawn(self, part: Part) -> list[Any]:
        """What `part.do` is given."""
        items = part.draw(random.Random(f"{self.part}-{self.seed}-{self.number}"))
        return items if self.only is None else [items[place] for place in self.only]

    def answer(self, part: Part) -> None:
        """Do the case in this process, and print what came of it."""
        items = self.drawn(part)
        shared = in_shared_memory()
        result = part.do(items, Path.cwd())
        deadline = time.monotonic() + LEFT_S
        while (left := in_shared_memory() - shared) and time.monotonic() < deadline:
            time.sleep(0.1)
        result.problems += [f"/dev/shm/{name} is left" for name in sorted(left)]
        print(ANSWER + json.dumps(attrs.asdict(result)), flush=True)

    def run(self, limit_s: float) -> Result:
        """Do the case in a process and a folder of its own, and look at what it leaves."""
        # Short, since names of sockets have at most 107 characters.
        with tempfile.TemporaryDirectory(prefix="hfc", dir="/tmp") as made:
            folder = Path(made)
            for name in ("work", "tmp"):
                (folder / name).mkdir()
            mark = f"campaign-{os.getpid()}-{time.monotonic_ns()}"
            environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "MARK": mark}
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": _import_path()}
            with (folder / "said").open("w+") as said:
                child = subprocess.Popen(
                    [*_apart(), sys.executable, "-m", "campaign", "--answer", self.name],
                    cwd=folder / "work",
                    env=environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    child.wait(limit_s)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                said.seek(0)
                text = said.read()
            result = _result(text)
            if result is None:
                result = Result(
                    problems=[f"its process has ended by {child.returncode}:\n{text[-3000:]}"]
                )
            for problem in left_behind(mark, folder):
                result.problem(problem)
            return result


def _apart() -> list[str]:
    """Begins the command of a process with file systems of its own, and an empty /dev/shm, where that may be."""
    apart = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        done = subprocess.run([*apart, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return [] if done.returncode else apart


def _import_path() -> str:
    return os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])


def _result(text: str) -> Result | None:
    for line in text.splitlines():
        if line.startswith(ANSWER):
            fields = json.loads(line.removeprefix(ANSWER))
            return Result(Counter(fields["counts"]), fields["problems"], fields["back_s"])
    return None


def marked(mark: str, folder: Path) -> dict[int, str]:
    """Processes that were started, however indirectly, with MARK in their environment -> their commands.

    Or that name the folder: some of Ray's write over their environment.
    """
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if (f"MARK={mark}".encode() in environment or f"{folder}/" in command) and not dead:
            found[int(process.name)] = command.strip()
    return found


def left_behind(mark: str, folder: Path) -> list[str]:
    """What a case has left: processes after 30 s, files; the processes are ended."""
    deadline = time.monotonic() + LEFT_S
    while (alive := marked(mark, folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    problems = [f"process {pid} is left: {command}" for pid, command in alive.items()]
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    # A local Ray's logs are kept, as the docs say; the other one is torch's own.
    kept = (f"hybridflow-{os.getuid()}", f"torchinductor_{getpass.getuser()}")
    return problems + [
        f"{path.name} is left in the folder of temporary files"
        for path in sorted((folder / "tmp").iterdir())
        if path.name not in kept
    ]
