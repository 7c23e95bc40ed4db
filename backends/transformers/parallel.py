"""Tensor parallelism of the fast decoder: each rank's part of the parameters, and the collectives.

Heads and MLP units are cut over the ranks as Megatron does (arXiv:1909.08053), embedding and head
by vocabulary. With tp 1 a rank holds everything, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

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
    """A model cut over `tp` ranks, on rank number `at` of them."""

    tp: int = 1
    """Number of tensor-parallel ranks."""
    at: int = 0
    """This rank's number among them."""
    world: int = 1
    """Number of ranks of the actor."""
    group: dist.ProcessGroup | None = None
    """Process group of the tensor-parallel ranks."""
    shape: ModelShape | None = None
    """Sizes of the model; known where tp > 1."""
    generation: GenerationLayout | None = None
    """The ranks of each replica; known where tp > 1."""

    @classmethod
    def of(cls, context, hf_config) -> Split:
        """Return the split of a RankContext, for a model of which `why_not` is None.

        Collective with tp > 1: it makes the process groups.
        """
        generation = getattr(context, "generation", None)
        layout = getattr(context, "layout", None)
        world = 1 if layout is None else layout.world

        if generation is not None and generation.pp > 1:
            raise ModelError(
                "the transformers rollout engine has no pipeline parallelism; the generation "
                f"layout has pp {generation.pp}: it must be 1"
            )
        if generation is None or generation.tp == 1:
            return cls(world=world)
        tp = generation.tp
        shape = shape_of(hf_config.to_dict())

        # Ranks in a process group ascend, and results are joined in that order.
        pipeline_stages = chain.from_iterable(generation.replicas)
        ranks = next(stage for stage in pipeline_stages if context.rank in stage)
        if list(ranks) != sorted(ranks):
            raise ModelError(
                f"the ranks of a generation replica must ascend with the tp rank; they are {ranks}"
            )
        return cls(
            tp=tp,
            at=ranks.index(context.rank),
            world=world,
            group=context.group("generation.tp"),
            shape=shape,
            generation=generation,
        )

    # --- boxes ---

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        """Return the box of a canonical parameter that this rank holds."""
        if self.shape is None:
            return Box.full(shape)
        return tensor_shard(name, shape, self.shape, self.tp, self.at)

    def layout(
        self,
        params: Mapping[str, Param],
        ties: Mapping[str, str],
        opaque: Iterable[str],
    ) -> WeightLayout:
        """Return the boxes that every rank of the actor holds."""
        if self.shape is not None and self.generation is not None:
            layout = engine_layout(self.shape, self.generation, params, opaque=opaque)
            return attrs.evolve(layout, ties=ties)

        # Every rank holds everything. Parameters of one shape share their boxes.
        ranks = range(self.world)
        by_shape = {}
        for param in params.values():
            boxes = (Box.full(param.shape),)
            by_shape[param.shape] = dict.fromkeys(ranks, boxes)
        shards = {name: by_shape[param.shape] for name, param in params.items()}
        return WeightLayout.by_name(params, shards, ranks, ties, opaque)

    # --- collective calls ---

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, made in place."""
        if self.tp > 1:
            dist.all_reduce(parts, group=self.group)
        return parts

    def columns(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' columns side by side: [R, n] -> [R, tp * n]."""
        if self.tp == 1:
            return part
        rows, columns = part.shape

        # Gathering stacks the ranks' parts by rows: [tp * R, n].
        parts = part.new_empty(self.tp * rows, columns)
        dist.all_gather_into_tensor(parts, part, group=self.group)
        parts = parts.view(self.tp, rows, columns).transpose(0, 1)
        return parts.reshape(rows, -1)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values on every rank.

        Values that all ranks compute may differ in the last bit, since GPUs scan a single row in no
        fixed order. Ranks that sample different tokens would diverge for the rest of the sequence.
        """
        if self.tp > 1:
            values = values.contiguous()
            dist.broadcast(values, group=self.group, group_src=0)
        return values

    def least(self, value: float, device: torch.device) -> float:
        """Return the smallest of the ranks' values."""
        if self.tp == 1:
            return value
        minimum = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(minimum, dist.ReduceOp.MIN, group=self.group)
        return float(minimum)


WHOLE = Split()
"""The split of a model that one rank holds as a whole."""
