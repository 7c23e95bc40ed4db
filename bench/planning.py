"""Seconds to plan the resharding of a 70B Llama over 64, 1,024 and 16,384 ranks, on one core, layouts and figures included.

One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
from common import emit, timed

from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.kit.huggingface.shapes import PUBLISHED
from hybridflow.kit.layouts import engine_layout, fsdp_layout, megatron_layout, zero3_layout

BARS = {64: 2.0, 1024: 30.0, 16384: 60.0}
"""Ranks -> seconds."""
TP = 8


def plan(kind: str, ranks: int) -> None:
    shape = PUBLISHED["llama-70b"]
    if kind == "megatron":
        train = ParallelLayout(pp=8, tp=8, dp=ranks // 64)
        source = megatron_layout(shape, train)
    else:
        train = ParallelLayout(dp=ranks)
        source = (
            fsdp_layout(shape.params(), train)
            if kind == "fsdp"
            else zero3_layout(shape.params(), ranks)
        )
    made = plan_reshard(source, engine_layout(shape, generation_layout(train, 1, TP)))
    for figure in (
        made.bytes_received,
        made.bytes_sent,
        made.peak_bytes,
        made.bytes_redundant,
        made.bytes_aliased,
    ):
        max(figure.values())


def main() -> int:
    good = True
    for ranks, bar in BARS.items():
        for kind in ("megatron", "fsdp", "zero3"):
            seconds = timed(lambda kind=kind, ranks=ranks: plan(kind, ranks))
            good &= emit(
                f"plan llama-70b, {kind} on {ranks:,} ranks to tp {TP}",
                seconds,
                "s",
                bar=bar,
                at_most=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
