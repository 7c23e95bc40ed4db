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

    switches = {
        "stage": (1, 2, 3),
        "activation_checkpointing": (False, True),
        "precision": ("fp32", "bf16"),
    }

    stage: int = attrs.field(default=3, validator=attrs.validators.in_((1, 2, 3)))
    """ZeRO stage: 1 shards the optimizer state over the dp ranks, 2 the gradients too, 3 the
    weights too."""
    precision: str = attrs.field(default="fp32", validator=attrs.validators.in_(("fp32", "bf16")))
    """fp32: everything in float32. bf16: weights and compute in bfloat16; the optimizer holds
    float32 masters, and gradients are accumulated in float32."""
    adam: str = attrs.field(default="torch", validator=attrs.validators.in_(("torch", "cpu")))
    """torch: torch's fused AdamW. cpu: DeepSpeedCPUAdam, which needs offload_optimizer; its first
    use compiles for a minute or two."""
    offload_optimizer: bool = False
    """Masters and moments stay in the host's memory, and the optimizer step runs on the CPU."""
    offload_parameters: bool = False
    """Stage 3: the shards of the weights stay in the host's memory too."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory for about a third more
    time. On CUDA it is off for models of at most 0.5 billion parameters."""
    bucket_elements: int = attrs.field(default=50_000_000, validator=attrs.validators.ge(1))
    """Number of elements of a bucket, in which gradients are reduced and weights are prefetched."""
    persist_elements: int = attrs.field(default=100_000, validator=attrs.validators.ge(0))
    """Stage 3: parameters with fewer elements are kept whole on every rank."""
    overlap: bool = True
    """On GPUs, reduce gradients while the backward pass goes on."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the model's own weights; needs peft."""
    zero: dict[str, Any] = attrs.field(factory=dict)
    """Further settings of DeepSpeed's "zero_optimization", named as in its documentation; they
    override those that follow from the settings above."""

    def __attrs_post_init__(self):
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"offload_parameters needs stage 3, got stage {self.stage}")
        if self.adam == "cpu" and not self.offload_optimizer:
            raise ValueError(
                "adam 'cpu' steps on the CPU: set offload_optimizer = true, or adam = 'torch'"
            )

    def sharding(self, trained: bool) -> Zero:
        """Describe the backend's sharding with these settings for memory and time estimates."""
        wide = self.precision == "fp32"
        return Zero(
            stage=self.stage,
            weight_bytes=4 if wide else 2,
            # Two moments and a master, all float32: in fp32, too, the masters are copies.
            optimizer_bytes=0 if self.offload_optimizer else 12,
            keeps_gradients=self.stage == 3,
            bucket_elements=self.bucket_elements,
            compute_bytes=4 if wide else 2,
            recompute=self.activation_checkpointing,
            on_host=self.offload_parameters,
            adapter_rank=self.lora.rank if self.lora and trained else 0,
        )

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Return whether all ranks of the layout are data-parallel."""
        return layout.world == layout.dp

    def planned_layout(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        dtype: torch.dtype,
    ) -> WeightLayout:
        """Return the boxes of each rank: parts of flat parameters in stage 3, else everything."""
        if self.stage == 3:
            return zero3_layout(shape.params(dtype), layout.world, shape.ties)
        return super().planned_layout(shape, layout, dtype)
