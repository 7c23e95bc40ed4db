"""What the small model learns in environments: mazes of ours, a world of Gymnasium, a task of reasoning-gym, and as agents
two roles that argue, and programs that a sandbox tests.

python bench/environments.py      (make environments)
python bench/environments.py --only debate coding --seed 0 1 2 --draw docs/curves/agents.svg

Each runs its example as a user types it. One JSON line per figure; exits 1 where a held-out score has not risen by 20 points by
training on the environment's rewards alone, or where a run takes 5 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, emit

EXAMPLES = {"maze": "", "frozen_lake": "", "spelling": "grpo", "debate": "grpo", "coding": "grpo"}
"""Example -> its stage that is trained on rewards."""
RISE, LIMIT_S = 0.20, 300.0


def curve(metrics: Path) -> list[tuple[int, float]]:
    """The held-out scores of a run, with their steps; the first is taken before its first step."""
    rows = map(json.loads, metrics.read_text().splitlines())
    return [(row["step"], row["validation/score"]) for row in rows if "validation/score" in row]


def trained(example: str, seed: int) -> tuple[list[tuple[int, float]], float]:
    """Run an example: its curve, and how long it took, start and all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hybridflow.cli.main", "run", f"examples/{example}.toml"]
        started = time.perf_counter()
        subprocess.run(
            [*command, f"run.folder={folder}", f"run.seed={seed}"],
            cwd=ROOT,
            check=True,
            stdout=sys.stderr,
        )
        seconds = time.perf_counter() - started
        return curve(Path(folder, example, EXAMPLES[example], "metrics.jsonl")), seconds


def draw(curves: dict[tuple[str, int], list[tuple[int, float]]], file: Path) -> None:
    """A picture of the held-out scores over the steps, an example beside the other."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "hybridflow", "font.size": 9})
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for name, _ in curves))
    size = (4.2 * len(names), 2.3)
    figure, [places] = pyplot.subplots(
        1, len(names), figsize=size, layout="constrained", squeeze=False
    )
    for (name, seed), points in curves.items():
        axes = places[names.index(name)]
        axes.plot(*zip(*points, strict=True), label=f"seed {seed}")
        axes.set(title=name, xlabel="step", ylabel="held-out score", ylim=(0, 1.02))
    places[0].legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=EXAMPLES, nargs="*", default=[*EXAMPLES])
    parser.add_argument("--seed", type=int, nargs="*", default=[0])
    parser.add_argument("--draw", type=Path, help="file of a picture")
    asked = parser.parse_args()
    met = True
    curves = {}
    for example, seed in itertools.product(asked.only, asked.seed):
        curves[example, seed], seconds = trained(example, seed)
        found = [score for _, score in curves[example, seed]]
        name = f"{example}, seed {seed}"
        met &= emit(f"{name}: held-out score at the end", found[-1], "1", spread=found)
        met &= emit(f"{name}: risen by", found[-1] - found[0], "1", bar=RISE)
        met &= emit(f"{name}: time", seconds, "s", bar=LIMIT_S, at_most=True)
    if asked.draw:
        draw(curves, asked.draw)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
