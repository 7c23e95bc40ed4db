"""Runs the campaign for a while: `make campaign [MINUTES=30] [SEED=0]`, from the repository's root.

    python -m campaign --minutes 30 --seed 0    goes on where the same seed ended before; status 1: something was found
    python -m campaign --case runs-0-17         one case again, with --case runs-0-17:2,5 two of its items
    python -m campaign --table                  what all seeds together have done, as a table

The folder `campaign` has the ledger, a line for each case, and what undisturbed runs give. It is begun anew with --anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from campaign.cases import ROOT, Case, Part, Result
from campaign.shrinking import smallest

PARTS = {
    "configs": ("Configs", 0.15),
    "damages": ("Damages", 0.15),
    "programs": ("Programs", 0.05),
    "runs": ("Runs", 0.65),
}
"""Module -> its class, and its share of the time."""
LIMIT_S = 900.0
"""Seconds that a case may take."""
TRIES = 4
"""Cases that are run to find what of a finding is needed."""


def part_named(name: str) -> Part:
    """A part; its module is imported, with torch, in the process of a case alone."""
    module = __import__(f"campaign.{name}", fromlist=[PARTS[name][0]])
    made: Part = getattr(module, PARTS[name][0])()
    return made


class Ledger:
    """The cases that were run, a line of JSON each."""

    def __init__(self, folder: Path):
        self.file = folder / "ledger.jsonl"
        self.lines: list[dict[str, Any]] = []
        if self.file.exists():
            self.lines = [json.loads(line) for line in self.file.read_text().splitlines()]

    def add(self, case: Case, seconds: float, result: Result, least: str) -> None:
        line = {
            "case": case.name,
            "part": case.part,
            "seed": case.seed,
            "seconds": round(seconds, 1),
        }
        line |= attrs.asdict(result) | {"least": least}
        self.lines.append(line)
        with self.file.open("a") as file:
            print(json.dumps(line), file=file)

    def seconds(self, seed: int, part: str) -> float:
        """How long the cases of a seed and a part have taken."""
        return sum(
            one["seconds"] for one in self.lines if (one["seed"], one["part"]) == (seed, part)
        )

    def next(self, seed: int, part: str) -> Case:
        """The first case that was not run."""
        done = {one["case"] for one in self.lines}
        number = 0
        while (case := Case(part, seed, number)).name in done:
            number += 1
        return case

    def table(self) -> str:
        """What was done, and what was found."""
        counts: Counter[str] = Counter()
        back: dict[str, float] = {}
        for one in self.lines:
            counts += Counter(one["counts"])
            for what, seconds in one["back_s"].items():
                back[what] = max(back.get(what, 0.0), seconds)
        seeds = sorted({one["seed"] for one in self.lines})
        rows = [
            f"| what (seeds {', '.join(map(str, seeds))}) | times | slowest to the next step |",
            "|---|---|---|",
        ]
        for what, count in sorted(counts.items()):
            rows.append(f"| {what} | {count} | {f'{back[what]:.0f} s' if what in back else ''} |")
        found = sum(bool(one["problems"]) for one in self.lines)
        rows.append(f"| cases with findings | {found} of {len(self.lines)} | |")
        return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--case")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--anew", action="store_true")
    given = parser.parse_args(argv)
    if given.answer:
        os.environ["HYBRIDFLOW_TESTS"] = str(os.getpid())  # helpers/shared_memory.py
        case = Case.named(given.answer)
        case.answer(part_named(case.part))
        return 0

    folder = ROOT / "campaign"
    if given.anew:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder)
    if given.table:
        print(ledger.table())
        return 0
    references = folder / _code()
    for other in folder.glob("references-*"):
        if other != references:
            shutil.rmtree(other)
    os.environ["CAMPAIGN"] = str(references)
    if given.case:
        result = Case.named(given.case).run(LIMIT_S)
        print(f"{dict(result.counts)}, seconds to the next step: {result.back_s}")
        print("\n\n".join(result.problems) or f"nothing was found in {given.case}")
        return 1 if result.problems else 0
    return go_on(ledger, given.seed, given.minutes, given.parts)


def go_on(ledger: Ledger, seed: int, minutes: float, parts: Sequence[str]) -> int:
    """Run cases until the time is over."""
    until = time.monotonic() + 60 * minutes
    found = 0
    while time.monotonic() < until:
        # The part whose time is shortest for its share; each is done once at first.
        name = min(parts, key=lambda name: ledger.seconds(seed, name) / PARTS[name][1])
        case = ledger.next(seed, name)
        began = time.monotonic()
        result = case.run(LIMIT_S)
        seconds = time.monotonic() - began
        done = ", ".join(f"{count} {what}" for what, count in sorted(result.counts.items()))
        print(f"{case.name}: {seconds:.0f} s: {done}", flush=True)
        least = ""
        if result.problems:
            found += 1
            print("FOUND\n" + "\n\n".join(result.problems), flush=True)
            least = reduced(case)
            print(f"again: make campaign CASE={least}", flush=True)
        ledger.add(case, seconds, result, least)
    print(ledger.table())
    return 1 if found else 0


def reduced(case: Case) -> str:
    """The name of the case with fewer items that still shows a problem; with all, where it shows none again."""
    count = len(case.drawn(part_named(case.part)))

    def fails(places: Sequence[int]) -> bool:
        return bool(attrs.evolve(case, only=tuple(places)).run(LIMIT_S).problems)

    if not fails(range(count)):
        print("it does not show again: it depends on the moment")
        return case.name
    return attrs.evolve(case, only=tuple(smallest(range(count), fails, TRIES))).name


def _code() -> str:
    """A name of the code: what undisturbed runs give holds for it alone."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = [ROOT / name for name in names if (ROOT / name).exists()]
    return (
        "references-"
        + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    )


if __name__ == "__main__":
    sys.exit(main())
