"""Settings of the backend and of the engine: what can be said before either is built."""

import attrs
from strange_kernels import half, stripes

from hybridflow.core import (
    Box,
    CollectiveCost,
    EngineLimits,
    EngineSettings,
    Execution,
    Footprint,
    Phase,
    TrainingSettings,
    WeightLayout,
)
from hybridflow.kit.huggingface.shapes import shape_of


def striped_boxes(shape, height, rank, ranks):
    """A parameter's stripes of rows."""
    return tuple(
        Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
        for first, last in stripes(shape[0], height, rank, ranks)
    )


def half_box(shape, rank, ranks):
    first, last = half(shape[0], rank, ranks)
    return Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))


@attrs.frozen
class StripedConfig(TrainingSettings):
    """Keys of ROLE.backend."""

    height: int = 8
    """Rows of a stripe."""

    def model_shape(self, hf_config):
        return shape_of(hf_config)

    def execution(self, trained):
        return Execution(offloads=False)

    def takes(self, shape, layout):
        return layout.world == layout.dp

    def footprint(self, size, layout, trained, micro_batches):
        """Float32 weights, and AdamW's two moments, dealt out; whole weights come for every call and go after it."""
        whole = 4.0 * size.params
        gather = CollectiveCost("all_gather", whole, layout.dp, 1)
        if not trained:
            return Footprint(
                resident=whole / layout.dp,
                reading=whole,
                weight_ranks=layout.dp,
                spread_over_dp=True,
                call=(gather,),
            )
        return Footprint(
            resident=4 * whole / layout.dp,
            reading=whole,
            training=(Phase(whole, "forward"), Phase(2 * whole, "backward")),
            weight_ranks=layout.dp,
            spread_over_dp=True,
            call=(gather,),
            update=(CollectiveCost("all_reduce", whole, layout.dp, 1),),
            step_traffic=7 * whole / layout.dp,
        )

    def planned_layout(self, shape, layout, dtype):
        params = shape.params(dtype)
        held = {
            rank: {
                name: striped_boxes(param.shape, self.height, rank, layout.dp)
                for name, param in params.items()
            }
            for rank in range(layout.dp)
        }
        return WeightLayout(params, held, shape.ties)


@attrs.frozen
class HalvesConfig(EngineSettings):
    """Keys of [rollout]."""

    at_once: int = 16
    """Sequences decoded at once."""

    def limits(self, device="cuda"):
        return EngineLimits(weight_bytes=4, max_sequences=self.at_once)

    def planned_layout(self, shape, generation, dtype):
        params = shape.params(dtype)
        held = {
            rank: {
                name: (half_box(param.shape, at, generation.tp),) for name, param in params.items()
            }
            for replica in generation.replicas
            for at, rank in enumerate(replica[0])
        }
        return WeightLayout(params, held, shape.ties)
