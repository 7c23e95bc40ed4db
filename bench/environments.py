"""What the small model learns in environments: mazes of ours, a world of Gymnasium, a task of reasoning-gym, and as an agent's
two roles that argue.

python bench/environments.py      (make environments)

Each runs its example as a user types it. One JSON line per figure; exits 1 where a held-out score has not risen by 20 points by
training on the environment's rewards alone, or where a run takes 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, emit

EXAMPLES = {"maze": "", "frozen_lake": "", "spelling": "grpo", "debate": "grpo"}
"""Example -> its stage that is trained on rewards."""
RISE, LIMIT_S = 0.20, 300.0


def scores(metrics: Path) -> list[float]:
    """The held-out scores of a run, in order; the first is taken before its first step."""
    rows = map(json.loads, metrics.read_text().splitlines())
    return [row["validation/score"] for row in rows if "validation/score" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=EXAMPLES, nargs="*", default=[*EXAMPLES])
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    met = True
    for example in asked.only:
        stage = EXAMPLES[example]
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "hybridflow.cli.main",
                "run",
                f"examples/{example}.toml",
            ]
            started = time.perf_counter()
            subprocess.run(
                [*command, f"run.folder={folder}", f"run.seed={asked.seed}"],
                cwd=ROOT,
                check=True,
                stdout=sys.stderr,
            )
            seconds = time.perf_counter() - started
            found = scores(Path(folder, example, stage, "metrics.jsonl"))
        met &= emit(f"{example}: held-out score at the end", found[-1], "1", spread=found)
        met &= emit(f"{example}: risen by", found[-1] - found[0], "1", bar=RISE)
        met &= emit(f"{example}: time", seconds, "s", bar=LIMIT_S, at_most=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
