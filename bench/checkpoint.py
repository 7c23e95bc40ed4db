"""What checksums cost a checkpoint, and how fast it is written and read: one rank, float32 weights and two moments.

The values of 40 million parameters with Adam's moments, 0.48 GB. Written as a run writes them: files, index, fsync. The
time in checksums is measured inside the same writes. One JSON line per figure; exits 1 where they take over 5% of it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import emit, timed

from hybridflow.core.running.checkpoint import Checkpoints, State
from hybridflow.core.values.weights import Box
from hybridflow.kit import checkpoint_files
from hybridflow.kit.checkpoint import MOMENTS, StatePart, load_state, save_state

BAR = 0.05
ROUNDS = 7
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    parts = state()
    size = sum(part.values.nbytes for part in parts) / 1e9

    # The checksum itself, with a clock around it
    spent: list[float] = []
    plain = checkpoint_files.checksum

    def clocked(values: torch.Tensor) -> str:
        started = time.perf_counter()
        digest = plain(values)
        spent.append(time.perf_counter() - started)
        return digest

    checkpoint_files.checksum = clocked
    shares, writes, reads = [], [], []
    folder = Path(tempfile.mkdtemp())
    try:
        checkpoints = Checkpoints(folder, 1)
        path = checkpoints.path(1)
        for _ in range(ROUNDS):
            spent.clear()
            writes.append(timed(lambda: write(checkpoints, parts)))
            shares.append(sum(spent) / writes[-1])
            reads.append(timed(lambda: load_state(parts, path, "actor")))
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    emit("checkpoint/write", size / statistics.median(writes), "GB/s")
    emit("checkpoint/read", size / statistics.median(reads), "GB/s")
    share = statistics.median(shares)
    met = emit("checkpoint/checksums", share, "of writing", bar=BAR, at_most=True, spread=shares)
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
