"""What the ranks of a test run. Each function is called as function(rank, world, *args) on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.contracts.rollout import Completion, Request
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box

GROUPS: dict[int, dict] = {}
"""Process groups that the engines of a process share."""


@attrs.frozen(eq=False)
class Model:
    """A Hugging Face config, weights by canonical name, and the engine's settings."""

    fields: dict[str, Any]
    weights: dict[str, torch.Tensor]
    config: TransformersEngineConfig = attrs.field(factory=TransformersEngineConfig)


def generation_of(tp: int) -> GenerationLayout:
    return generation_layout(ParallelLayout(tp=tp), tp=tp)


def make_engine(model: Model, context: Any) -> TransformersEngine:
    """Started, with this rank's part of the weights, each box in pieces."""
    engine = TransformersEngine(ModelSpec(model.fields, None, 0), model.config, context)
    engine.start()
    engine.begin_update(1)
    for name, boxes in engine.layout().held[context.rank].items():
        for box in boxes:
            for piece in pieces(box):
                engine.receive(name, piece, model.weights[name][piece.slices()])
    engine.end_update()
    return engine


def pieces(box: Box) -> list[Box]:
    """The box cut in two, unevenly, along each dimension."""
    cuts = [sorted({a, (2 * a + b) // 3, b}) for a, b in zip(box.start, box.stop, strict=True)]
    return [
        Box(
            tuple(c[i] for c, i in zip(cuts, at, strict=True)),
            tuple(c[i + 1] for c, i in zip(cuts, at, strict=True)),
        )
        for at in np.ndindex(*[len(c) - 1 for c in cuts])
    ]


def generate(
    rank: int, world: int, model: Model, calls: Sequence[list[Request]]
) -> list[list[Completion]]:
    """The completions of each call, in the order in which they came."""
    layout = ParallelLayout(tp=world)
    groups = GROUPS.setdefault(world, {})
    context = RankContext(
        "actor", rank, layout, torch.device("cpu"), 0, generation_of(world), groups
    )
    engine = make_engine(model, context)
    return [list(engine.submit(requests)) for requests in calls]
