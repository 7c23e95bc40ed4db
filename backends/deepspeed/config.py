"""Configuration of the DeepSpeed training backend."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import WeightLayout
from hybridflow.kit.footprints import KnownSettings, Zero
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.layouts import zero3_layout


@attrs.frozen
class DeepSpeedConfig(KnownSettings):
    """DeepSpeed's ZeRO (arXiv:1910.02054) on Hugging Face models."""

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))
    """What is spread over the dp ranks: 1 the optimizer's state, 2 gradients too, 3 weights too."""
    precision: str = attrs.field(default="fp32", validator=attrs.validators.in_(("fp32", "bf16")))
    """fp32: everything in float32. bf16: weights and compute in bfloat16 beside float32 masters, which the optimizer
    has; gradients are added up in float32."""
    adam: str = attrs.field(default="torch", validator=attrs.validators.in_(("torch", "cpu")))
    """torch: torch's fused AdamW. cpu: DeepSpeedCPUAdam, made for offload_optimizer (its first use compiles for a minute or
    two)."""
    offload_optimizer: bool = False
    """Masters and moments stay on the CPU, where the step is made."""
    offload_parameters: bool = False
    """Stage 3: the shards of the weights stay on the CPU too."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward: memory for about a third more time."""
    bucket_elements: int = attrs.field(default=50_000_000, validator=attrs.validators.ge(1))
    """Gradients are reduced, and weights fetched ahead, so many elements at a time."""
    persist_elements: int = attrs.field(default=100_000, validator=attrs.validators.ge(0))
    """Stage 3: parameters of fewer elements are kept whole on every rank."""
    overlap: bool = True
    """Reduce gradients while the backward goes on (GPUs)."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the model's own weights; needs peft."""
    zero: dict[str, Any] = attrs.field(factory=dict)
    """More settings of DeepSpeed's "zero_optimization", as its own documentation names them."""

    def __attrs_post_init__(self):
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"offload_parameters needs stage 3, got stage {self.stage}")
        if self.adam == "cpu" and not self.offload_optimizer:
            raise ValueError(
                "adam 'cpu' steps on the CPU: set offload_optimizer = true, or adam = 'torch'"
            )

    def sharding(self, trained: bool) -> Zero:
        wide = self.precision == "fp32"
        return Zero(
            stage=self.stage,
            weight_bytes=4 if wide else 2,
            optimizer_bytes=0
            if self.offload_optimizer
            else 12,  # masters beside float32 weights, too
            keeps_gradients=self.stage == 3,
            bucket_elements=self.bucket_elements,
            compute_bytes=4 if wide else 2,
            recompute=self.activation_checkpointing,
            on_host=self.offload_parameters,
            moves=trained or self.stage != 3,
            adapter_rank=self.lora.rank if self.lora and trained else 0,
        )

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        return layout.world == layout.dp

    def planned_layout(
        self, shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype
    ) -> WeightLayout:
        if self.stage == 3:
            return zero3_layout(shape.params(dtype), layout.world, shape.ties)
        return super().planned_layout(shape, layout, dtype)
