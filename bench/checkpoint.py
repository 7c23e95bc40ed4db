"""What checksums cost a checkpoint, and how fast it is written and read: one rank, float32 weights and two moments.

The values of 40 million parameters with Adam's moments, 0.48 GB. Written as a run writes them, into memory; in
turns with and without checksums. One JSON line per figure; exits 1 where the fastest writes take over 5% longer with them.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import emit, timed

from hybridflow.core.running.checkpoint import Checkpoints, State
from hybridflow.core.values.weights import Box
from hybridflow.kit import checkpoint_files
from hybridflow.kit.checkpoint import MOMENTS, StatePart, load_state, save_state

BAR = 0.05
ROUNDS = 40
MEMORY = "/dev/shm"
"""A disk is slower, and other writes to it are felt more than checksums are."""
LAYERS = 10
SHAPES = {"attention": (1024, 1024), "up": (1024, 1500), "down": (1500, 1024), "norm": (1024,)}


def state() -> list[StatePart]:
    """Weights and moments under a trainer's names."""
    entries = ["model", *(f"optimizer.{moment}" for moment in MOMENTS)]
    return [
        StatePart(f"{entry}.{layer}.{name}", shape, Box.full(shape), torch.randn(shape))
        for entry in entries
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    ]


def write(checkpoints: Checkpoints, parts: list[StatePart]) -> None:
    """Write a checkpoint as a run's controller does."""
    checkpoints.write(State(1, {}, {}, {}, {}, 0), lambda folder: save_state(parts, 1, folder, 0))


def fastest(seconds: list[float]) -> float:
    """The mean of the fastest quarter: others on the machine make some writes longer."""
    best = sorted(seconds)[: len(seconds) // 4]
    return statistics.mean(best)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    parts = state()
    size = sum(part.values.nbytes for part in parts) / 1e9

    # In turns with a write whose checksums are none
    plain = checkpoint_files.checksum
    none = "0" * 16
    writes, without, reads = [], [], []
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        checkpoints = Checkpoints(folder, 1)
        path = checkpoints.path(1)
        for number in range(2 * ROUNDS):
            summed = number % 2 == number // 2 % 2  # with, without, without, with
            checkpoint_files.checksum = plain if summed else lambda values: none
            (writes if summed else without).append(timed(lambda: write(checkpoints, parts)))
            checkpoint_files.checksum = plain
            if summed:
                reads.append(timed(lambda: load_state(parts, path, "actor")))
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    alone = timed(lambda: [plain(part.values) for part in parts])

    emit("checkpoint/write", size / statistics.median(writes), "GB/s")
    emit("checkpoint/read", size / statistics.median(reads), "GB/s")
    emit("checkpoint/checksums alone", size / alone, "GB/s")
    ratio = fastest(writes) / fastest(without)
    met = emit(
        "checkpoint/with checksums",
        fastest(writes),
        "s",
        ratio=ratio,
        against="without",
        bar=1 + BAR,
        at_most=True,
        spread=[mine / other for mine, other in zip(writes, without, strict=True)],
    )
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
