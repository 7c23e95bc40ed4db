"""Tensor parallelism: which part of each parameter this rank has, and the calls that bring the parts together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.huggingface.shapes import shape_of
from hybridflow.kit.layouts import engine_layout, tensor_shard


@attrs.frozen(eq=False)
class Split:
    """A model over `tp` ranks, of which this is number `at`. With tp 1 a rank has all of it and nothing is sent."""

    tp: int = 1
    at: int = 0
    world: int = 1
    """Ranks of the actor."""
    group: dist.ProcessGroup | None = None
    shape: ModelShape | None = None
    """Known where tp > 1."""
    generation: GenerationLayout | None = None

    @classmethod
    def of(cls, context, hf_config, unfit: str | None) -> Split:
        """From a RankContext; with tp > 1 every rank must call it, for it makes the process groups.

        `unfit`: why the fast decoder does not run this model. Raises ModelError where the model cannot be cut so.
        """
        generation, layout = getattr(context, "generation", None), getattr(context, "layout", None)
        world = 1 if layout is None else layout.world
        if generation is not None and generation.pp > 1:
            raise ModelError(
                f"the transformers rollout engine has no pipeline parallelism; the generation layout has pp "
                f"{generation.pp}: it must be 1"
            )
        if generation is None or generation.tp == 1:
            return cls(world=world)
        tp = generation.tp
        if unfit is not None:
            raise ModelError(
                f"only the fast decoder has tensor parallelism, and it is not used here: {unfit}; the generation "
                f"layout has tp {tp}: it must be 1"
            )
        shape = shape_of(hf_config.to_dict())
        if problems := shape.tensor_parallel_problems(tp):
            raise ModelError(
                f"the rollout model cannot be cut into {tp} parts: {'; '.join(problems)}"
            )
        ranks = next(
            stage for replica in generation.replicas for stage in replica if context.rank in stage
        )
        if list(ranks) != sorted(ranks):  # as process groups have them
            raise ModelError(
                f"the ranks of a generation replica must ascend with the tp rank; they are {ranks}"
            )
        return cls(
            tp, ranks.index(context.rank), world, context.group("generation.tp"), shape, generation
        )

    # ---- who has what -------------------------------------------------------------------------------------------

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        """What this rank has of a canonical parameter."""
        if self.shape is None:
            return Box.full(shape)
        return tensor_shard(name, shape, self.shape, self.tp, self.at)

    def layout(
        self, params: Mapping[str, Param], ties: Mapping[str, str], opaque: Iterable[str]
    ) -> WeightLayout:
        """What every rank of the actor has."""
        if self.shape is not None and self.generation is not None:
            return attrs.evolve(
                engine_layout(self.shape, self.generation, params, opaque=opaque), ties=ties
            )
        whole = {
            p.shape: dict.fromkeys(range(self.world), (Box.full(p.shape),)) for p in params.values()
        }
        shards = {name: whole[param.shape] for name, param in params.items()}
        return WeightLayout.by_name(params, shards, range(self.world), ties, opaque)

    # ---- collective calls ---------------------------------------------------------------------------------------

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        if self.tp > 1:
            dist.all_reduce(parts, group=self.group)
        return parts

    def columns(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' columns side by side: [R, n] -> [R, tp * n]."""
        if self.tp == 1:
            return part
        rows, n = part.shape
        parts = part.new_empty(self.tp * rows, n)
        dist.all_gather_into_tensor(parts, part, group=self.group)
        return parts.view(self.tp, rows, n).transpose(0, 1).reshape(rows, -1)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values. What ranks compute alike may differ in a last bit (GPUs scan a single row in no fixed
        order); ranks that sampled different tokens would part for ever."""
        if self.tp > 1:
            values = values.contiguous()
            dist.broadcast(values, group=self.group, group_src=0)
        return values

    def least(self, value: float, device: torch.device) -> float:
        """The smallest of the ranks' values."""
        if self.tp == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return float(found)


WHOLE = Split()
"""One rank with all of the model."""
