"""Memory of a training backend at full depth, on GPUs and ranks that are not there: 7.6B parameters, Qwen2.5-7B's widths.

The backend's own code runs as rank 0 of a layout, without values (docs/conformance.md, "Without a GPU"). Rows are short
(2 of 32 tokens), so that what autograd saves and the logits are small beside weights and gradients: the peaks contain
them. Exits 1 when a bar is missed: on 64 ranks at most 12 GB at the peak of an update, with 1 and with 8 micro-batches;
at rest, weights and moments within 5% of their bytes over the ranks that share them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import emit

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.model import ModelConfig
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.fakes.folder import write_hollow_folder
from hybridflow.kit.fakes.rehearsal import MicroBatches, Rehearser, rehearsed
from hybridflow.kit.testing.fake_gpu import FIELDS
from hybridflow.settle.models import resolve_model

LAYERS = 28
CASES: dict[str, tuple[ParallelLayout, dict[str, Any], int]] = {
    "dp 64": (ParallelLayout(dp=64), {}, 64),
    "dp 64, recomputed": (ParallelLayout(dp=64), {"activation_checkpointing": True}, 64),
    "dp 64 in 8 replicas": (ParallelLayout(dp=64), {"replicas": 8}, 8),
    "dp 16 tp 4": (ParallelLayout(dp=16, tp=4), {}, 64),
    "dp 8": (ParallelLayout(dp=8), {}, 8),
}
"""Name -> layout, settings, and the number of ranks that share one copy."""
BARRED = ("dp 64", "dp 64, recomputed", "dp 16 tp 4")
"""Every rank of these 64 has a part of its own."""
MOST = 12e9
BYTES = 4 + 8
"""Of a parameter between updates: a float32 master and two moments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    met = True
    with tempfile.TemporaryDirectory() as root:
        folder = write_hollow_folder(
            Path(root) / "model", {**FIELDS, "num_hidden_layers": options.layers}
        )
        for name in options.only:
            met &= measure(name, folder, full=options.layers == LAYERS)
            gc.collect()
    raise SystemExit(0 if met else 1)


def measure(name: str, folder: Path, full: bool) -> bool:
    """Run one case, print its figures, and give whether its bars are met."""
    layout, settings, shards = CASES[name]
    config = FSDPConfig(precision="bf16", **settings)
    spec = resolve_model(ModelConfig(path=str(folder)), "policy", "fake")
    started = time.process_time()
    with rehearsed(FSDPBackend, spec, config, OptimizerConfig(), layout) as run:
        run.update("first", MicroBatches())  # which makes the moments
        run.update("one", MicroBatches())
        run.update("eight", MicroBatches(count=8))
        run.offload("away")
        record = run.result()
        return report(name, run, record.parameters, shards, full) & emit(
            f"fake/{name}/seconds", time.process_time() - started, "CPU s"
        )


def report(name: str, run: Rehearser, parameters: int, shards: int, full: bool) -> bool:
    """Print the figures of a case."""
    met = True
    for phase in ("one", "eight"):
        bar: dict[str, Any] = {}
        if name in BARRED and full:
            bar = {"bar": MOST / 1e9, "at_most": True}
        met &= emit(f"fake/{name}/{phase}/peak", run.phases[phase].peak / 1e9, "GB", **bar)
    rest = run.phases["eight: step"].after
    share = rest / (parameters * BYTES / shards)
    met &= emit(
        f"fake/{name}/rest",
        rest / 1e9,
        "GB",
        ratio=share,
        against="bytes / ranks",
        bar=1.05,
        at_most=True,
    )
    return met & emit(
        f"fake/{name}/away", run.phases["away"].after, "bytes", bar=1024, at_most=True
    )


if __name__ == "__main__":
    main()
