"""One table of what a user would compare: GRPO steps, fine-tuning, generation and dispatch, beside the peers.

python bench/table.py [--only grpo sft generation dispatch] [--rounds 3] [--save FILE] [--read FILE]

Each part is a script of its own, which runs both sides in turns, each at its best; its ratios are medians over rounds, with
the least and the largest. Seconds and processor seconds are of one step. The table is Markdown. FILE has the parts' lines,
from which --read makes the table again. Exits 1 when a part fails or misses a bar.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARTS: dict[str, list[list[str]]] = {
    "grpo": [["grpo_step.py"], ["grpo_step.py", "--model", "20M", "--steps", "8"]],
    "sft": [["sft_step.py"], ["sft_step.py", "--model", "20M", "--steps", "8"]],
    "generation": [["rollout.py", "--only", "generation"]],
    "dispatch": [["dispatch.py"]],
}
"""Scripts of each part, and their options."""
ROUNDS = ("grpo", "sft")
"""Parts whose number of rounds can be chosen."""
HEADER = ("what", "value", "CPU", "ratio", "least to largest", "against", "bar", "aim")


def lines_of(command: list[str]) -> tuple[list[dict[str, Any]], bool]:
    """Run a script; return its lines, which are shown as they come, and whether it met its bars."""
    lines = []
    process = subprocess.Popen(
        [sys.executable, str(HERE / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            lines.append(json.loads(line))
            print(line, end="", file=sys.stderr, flush=True)
    return lines, process.wait() == 0


def row(line: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a line; what it lacks is empty."""
    spread = line.get("spread")
    bar = line.get("bar")
    missed = "" if line.get("met", True) else " (missed)"
    return (
        line["name"],
        f"{line['value']:g} {line['unit']}",
        f"{line['cpu']:g} s" if "cpu" in line else "",
        f"{line['ratio']:.2f}" if "ratio" in line else "",
        f"{spread[0]:.2f} to {spread[1]:.2f}" if spread else "",
        line.get("against", ""),
        "" if bar is None else f"{bar:g}{missed}",
        f"{line['aim']:g}" if "aim" in line else "",
    )


def table(lines: list[dict[str, Any]]) -> str:
    rows = [HEADER, ("---",) * len(HEADER), *map(row, lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path)
    arguments = parser.parse_args()
    if arguments.read:
        print(table([json.loads(line) for line in arguments.read.read_text().splitlines()]))
        return 0

    lines: list[dict[str, Any]] = []
    good = True
    for part in arguments.only:
        for command in PARTS[part]:
            more = ["--rounds", str(arguments.rounds)] if part in ROUNDS else []
            found, met = lines_of([*command, *more])
            good &= met
            lines += found
            if arguments.save:
                arguments.save.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
