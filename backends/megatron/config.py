"""Configuration of the Megatron training backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hybridflow.core.contracts.training import Packing
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import WeightLayout
from hybridflow.kit.footprints import KnownSettings, ThreeDSharding
from hybridflow.kit.layouts import megatron_layout


@attrs.frozen
class MegatronConfig(KnownSettings):
    """Megatron-Core's GPTModel (arXiv:1909.08053, 2104.04473) with its distributed optimizer."""

    switches = {"recompute": (False, True), "precision": ("fp32", "bf16")}
    recomputes = "recompute"

    precision: str = attrs.field(default="fp32", validator=attrs.validators.in_(("fp32", "bf16")))
    """fp32: everything in float32. bf16: weights and compute in bfloat16; a trained role's masters,
    moments and gradients are float32. Masters and moments are sharded over dp."""
    sequence_parallel: bool = False
    """With tp > 1: norms, and the other operations between the tensor-parallel matrices, work on
    1/tp of the tokens (arXiv:2205.05198)."""
    virtual_stages: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Chunks of layers per pipeline stage, interleaved (arXiv:2104.04473). More than 1 needs
    pp > 1."""
    recompute: bool = False
    """Recompute each layer's activations in the backward pass: less memory for about a third more
    time. On CUDA it is off for models of at most 0.5 billion parameters."""
    vocab_multiple: int = attrs.field(default=128, validator=attrs.validators.ge(1))
    """Each tp rank's part of the vocabulary is padded to a multiple of this."""

    def sharding(self, trained: bool) -> ThreeDSharding:
        """Describe the backend's sharding with these settings for memory and time estimates."""
        wide = self.precision == "fp32"
        return ThreeDSharding(
            distributed_optimizer=True,
            weight_bytes=4 if wide else 2,
            # Two moments of four bytes, and in bf16 a float32 master.
            optimizer_bytes=8 if wide else 12,
            compute_bytes=4 if wide else 2,
            recompute=self.recompute,
        )

    def packing(self, hf_config: Mapping[str, Any]) -> tuple[Packing, str]:
        """Pack all rows; a prompt is not shared."""
        return Packing.PACKED, "prompts are shared under fsdp and deepspeed alone"

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Return whether tp and pp suit a dense model's sizes and these settings."""
        if shape.experts or shape.kv_heads % layout.tp:
            return False
        if self.sequence_parallel and layout.tp == 1:
            return False

        # Interleaving needs pipeline stages, and chunks of equally many layers.
        if self.virtual_stages == 1:
            return True
        return layout.pp > 1 and shape.layers % (layout.pp * self.virtual_stages) == 0

    def planned_layout(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        dtype: torch.dtype,
    ) -> WeightLayout:
        """Return the boxes of each rank as Megatron holds them, in canonical names."""
        return megatron_layout(
            shape, layout, shape.params(dtype), self.virtual_stages, self.vocab_multiple
        )
