"""What a checkpoint holds training up for: one rank, float32 weights and two moments, 0.22 GB.

    held         from the call until training goes on
    copies       one copy of the same tensors in memory, into memory that was written before
    at once      the same files written and flushed in the rank itself, as a run without a writer would
    beside       how much longer the steps after it take, while the files are written

One JSON line per figure; exits 1 where training is held up for longer than 1.5 copies, or than a tenth of
writing at once where that is longer: the median of the checkpoints after the first, which also starts the writer and
takes the memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import emit, timed

from hybridflow.core.values.sealed import flush_file
from hybridflow.core.values.weights import Box
from hybridflow.kit.checkpoint import MOMENTS, StatePart, load_state, save_state
from hybridflow.kit.tensor_files import write_tensors

ROUNDS = 12
LAYERS = 6
SHAPES = {"attention": (1024, 1000), "up": (1000, 1024), "down": (1024, 1000), "norm": (1024,)}
STEPS = 5


def state() -> list[StatePart]:
    """Weights and moments under a trainer's names."""
    entries = ["model", *(f"optimizer.{moment}" for moment in MOMENTS)]
    return [
        StatePart(f"{entry}.{layer}.{name}", shape, Box.full(shape), torch.randn(shape))
        for entry in entries
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    ]


def at_once(parts: list[StatePart], folder: Path) -> None:
    """Write the same values in this process, and wait until they are on the disk."""
    file = folder / "all.safetensors"
    write_tensors({part.entry: part.values for part in parts}, file)
    flush_file(file)
    flush_file(folder)


def steps(matrix: torch.Tensor) -> None:
    """Work of the rank, about as long as the writing takes."""
    for _ in range(STEPS):
        matrix = (matrix @ matrix).clamp(-1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where it is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = state()
    size = sum(part.values.nbytes for part in parts) / 1e9
    copies = [torch.zeros_like(part.values) for part in parts]
    matrix = torch.randn(1024, 1024).clamp(-1, 1)

    held, copied, written, alone, beside = [], [], [], [], []
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        for number in range(ROUNDS + 1):
            place = folder / str(number)
            place.mkdir()
            alone.append(timed(lambda: steps(matrix)))
            began = time.perf_counter()
            writing = save_state(parts, 1, place, 0)
            held.append(time.perf_counter() - began)
            beside.append(timed(lambda: steps(matrix)))
            writing.done(wait=True)
            copied.append(
                timed(lambda: [c.copy_(p.values) for c, p in zip(copies, parts, strict=True)])
            )
            (folder / "plain").mkdir()
            written.append(timed(lambda: at_once(parts, folder / "plain")))
            if number == ROUNDS:
                for copy, part in zip(copies, parts, strict=True):
                    part.values.copy_(torch.zeros_like(copy))
                load_state(parts, place, "actor")
                same = all(torch.equal(c, p.values) for c, p in zip(copies, parts, strict=True))
                assert same, "what was read is not what was written"
            shutil.rmtree(place)
            shutil.rmtree(folder / "plain")
            os.sync()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    copy, writes = statistics.median(copied), statistics.median(written)
    bar = max(1.5 * copy, 0.1 * writes)
    emit("checkpoint/size", size, "GB")
    emit("checkpoint/one copy", copy, "s")
    emit("checkpoint/written at once", writes, "s")
    emit(
        "checkpoint/steps beside the writing",
        statistics.median(beside) / statistics.median(alone),
        "times",
    )
    emit("checkpoint/held by the first", held[0], "s")
    later = statistics.median(held[1:])
    met = emit(
        "checkpoint/held", later, "s", ratio=later / bar, against="the bar", bar=1.0, at_most=True
    )
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
