"""Planned models by plain figures: the kit's known ways to spread a model, without a backend."""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.core.contracts.footprint import EngineLimits
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.kit.footprints import FullyShardedLayers, Sharding, Spread, ThreeDSharding, Zero
from hybridflow.planner import PlannedModel

WAYS: dict[str, tuple[type[Sharding], dict[str, Any]]] = {
    "3d": (ThreeDSharding, {}),
    "3d-zero1": (ThreeDSharding, {"distributed_optimizer": True}),
    "zero1": (Zero, {"stage": 1}),
    "zero2": (Zero, {"stage": 2}),
    "zero3": (Zero, {"stage": 3}),
    "fsdp": (FullyShardedLayers, {}),
}
LIMITS = tuple(attrs.fields_dict(EngineLimits))
OWN = (
    "trained",
    "offload",
    "micro_batch_tokens",
    "axes",
    "max_rollout_tp",
    "max_rollout_pp",
    "keeps_engine",
    "lent_params",
)


def planned(
    name: str,
    shape: ModelShape,
    *,
    sharding: str = "3d",
    head: str = "policy",
    takes=None,
    **figures: Any,
):
    """A PlannedModel. `figures`: fields of the way of spreading, of EngineLimits (weights of the engine are
    `rollout_bytes`), and of PlannedModel; `takes(layout)` says which layouts the backend takes."""
    given = dict(figures)
    limits = {key: given.pop(key) for key in LIMITS if key in given and key != "weight_bytes"}
    if "rollout_bytes" in given:
        limits["weight_bytes"] = given.pop("rollout_bytes")
    own = {key: given.pop(key) for key in OWN if key in given}
    way, fixed = WAYS[sharding]
    settings = Given(way(**fixed, **given), takes)
    own.setdefault(
        "axes", frozenset({"dp", "tp", "pp"} if sharding.startswith("3d") else {"dp", "tp"})
    )
    size = ModelSize(shape, head, given.get("adapter_rank", 0))
    model = PlannedModel(
        name, size, settings, EngineLimits(**{"max_sequences": 1 << 40, **limits}), **own
    )
    GIVEN[id(model)] = (
        model,
        name,
        shape,
        {"sharding": sharding, "head": head, "takes": takes, **figures},
    )
    return model


GIVEN: dict[int, tuple] = {}
"""id of a model -> the model, which so stays, and what it was made of."""


def changed(model: PlannedModel, **changes: Any) -> PlannedModel:
    """The same model with other figures."""
    _, name, shape, figures = GIVEN[id(model)]
    return planned(name, shape, **{**figures, **changes})


@attrs.frozen
class Given(Spread):
    """A way of spreading, and the layouts that are taken."""

    only: Any = None

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        return self.only is None or self.only(layout)


def laid_out(pp: int = 1, tp: int = 1, dp: int = 1) -> ParallelLayout:
    return ParallelLayout(pp, tp, dp)


def engines(devices: int, pp: int = 1, tp: int = 1) -> GenerationLayout:
    """Engines of pp x tp on so many devices."""
    return GenerationLayout(ParallelLayout(dp=devices), pp, tp)
