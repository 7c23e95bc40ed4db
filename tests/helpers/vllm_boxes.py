"""What each rank of vLLM takes, against boxes by hand: Megatron's cut (arXiv:1909.08053) of Hugging Face's shapes."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from helpers import engine_jobs as jobs
from hybridflow.backends.vllm.config import VLLMConfig
from hybridflow.backends.vllm.engine import VLLMEngine
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box, Param
from hybridflow.kit.layouts import fsdp_layout
from hybridflow.kit.testing.models import reference

SMALL = VLLMConfig(kv_memory_gb=0.05, max_sequences=8)
HIDDEN = 128


def held_by_hand(name: str, shape: tuple[int, ...], rank: int) -> Box | None:
    """The box of rank 0 or 1 of two: heads and rows are halved, columns of what joins them, too."""
    full = Box.full(shape)
    part = name.split(".")[-2]
    if part in ("embed_tokens", "lm_head"):
        # 32 rows are padded to 64: the second half is padding alone.
        return full if rank == 0 else None
    if part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        half = shape[0] // 2
        return Box((rank * half, *full.start[1:]), ((rank + 1) * half, *full.stop[1:]))
    if part in ("o_proj", "down_proj"):
        half = shape[1] // 2
        return Box((0, rank * half), (shape[0], (rank + 1) * half))
    return full


def layout_of(rank: int, world: int, spec: ModelSpec) -> Any:
    engine = VLLMEngine(spec, SMALL, jobs.context_of(rank, world))
    engine.start()
    try:
        layout = engine.layout()
        return (
            {name: param.shape for name, param in layout.params.items()},
            {r: {n: tuple(b) for n, b in held.items()} for r, held in layout.held.items()},
            dict(layout.ties),
            dict(engine.weights.map.opaque),
        )
    finally:
        engine.close()


def check_boxes(ranks, architecture, tied):
    ref = reference(architecture, width=HIDDEN)
    spec = attrs.evolve(ref.spec, path=None)
    first, second = ranks(layout_of, 2, spec)
    assert first == second
    shapes, held, ties, opaque = first

    assert not opaque
    assert shapes == {name: tuple(values.shape) for name, values in ref.parameters.items()}
    assert ties == tied
    expected: dict[int, dict[str, tuple[Box, ...]]] = {0: {}, 1: {}}
    for rank, boxes in expected.items():
        for name, shape in shapes.items():
            box = held_by_hand(name, shape, rank)
            boxes[name] = (box,) if box is not None else ()
    assert held == expected

    # An FSDP trainer on the same two ranks sends what the other one lacks, and nothing else.
    params = {name: Param(shape, torch.float32) for name, shape in shapes.items()}
    trained = fsdp_layout(params, ParallelLayout(dp=2))
    target = attrs.evolve(trained, held=held)
    plan = plan_reshard(trained, target)
    for rank in range(2):
        lacking = 0
        for name, shape in shapes.items():
            wanted = torch.zeros(shape, dtype=torch.bool)
            for box in expected[rank][name]:
                wanted[box.slices()] = True
            rows = -(-shape[0] // 2)
            wanted[rank * rows : (rank + 1) * rows] = False
            lacking += int(wanted.sum())
        assert plan.bytes_received[rank] == 4 * lacking
