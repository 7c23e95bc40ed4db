"""What it costs to keep what a run generates (run.journal), and what it saves to train on it again (run.replay).

python bench/journal.py      a minute on two cores

The runtime inline, run.max_staleness = 2 with engines in a pool of their own, 32 responses a step of up to 400 tokens. One JSON
line per figure; exits 1 where a token takes more bytes than the bar, or where the replay has other weights in any bit.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
import ahead
from common import emit

from hybridflow.core.running.journal import Journal
from hybridflow.kit.testing.runs import MODEL, TinyRun
from hybridflow.settle.stages import overlay

BYTES = 20.0
"""The most bytes of a token."""
STEPS, FIRST = 8, 2
"""Steps are counted from step FIRST on."""


class Tailed(ahead.Tailed):
    """Responses with lengths of their own; no part of the training sleeps."""

    loss = ahead.GRPO.loss


def trained(folder: str, **run: Any) -> tuple[float, float, dict[str, int], Path]:
    """(seconds of a step, tokens generated, checksums of the weights, the run's folder)"""
    algorithm = {
        "name": "journal:Tailed",
        "prompts_per_step": 8,
        "group_size": 4,
        "correction": "truncate",
    }
    tables = {
        "run": {"folder": folder, "samples": 0, "max_staleness": 2, **run},
        "sampling": {"max_tokens": ahead.LONGEST},
        "actor": {"model": {"config": {**MODEL, "max_position_embeddings": 512}}},
    }
    ends: list[float] = []
    with TinyRun(algorithm, overlay(ahead.APART, tables)) as tiny:
        metrics = tiny.steps(STEPS, at_end=lambda: ends.append(time.perf_counter()))
        sums = tiny.checksums()
    tokens = sum(values["actor/response_length"] for values in metrics) * 32
    return (ends[-1] - ends[FIRST - 1]) / (STEPS - FIRST), tokens, sums, tiny.job.folder


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        plain, *_ = trained(f"{folder}/plain")
        kept, tokens, sums, run = trained(f"{folder}/kept", journal=True)
        size = sum(file.stat().st_size for file in Journal(run).folder.iterdir())
        again, _, replayed, _ = trained(f"{folder}/again", replay=str(run))
    met = emit("bytes of a token in the journal", size / tokens, "B", bar=BYTES, at_most=True)
    emit("a step that is kept", kept, "s", ratio=kept / plain, against="one that is not")
    emit(
        "a step that is replayed", again, "s", ratio=plain / again, against="one that is generated"
    )
    met &= emit("replayed with the same weights", int(sums == replayed), "1: yes", bar=1)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
