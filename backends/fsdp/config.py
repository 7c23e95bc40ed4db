"""Configuration of the FSDP2 training backend."""

from __future__ import annotations

import attrs
import torch

from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.footprints import FullyShardedLayers, KnownSettings
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.layouts import fsdp_layout, tensor_shard


@attrs.frozen
class FSDPConfig(KnownSettings):
    """PyTorch FSDP2 on Hugging Face models."""

    switches = {
        "reshard_after_forward": (False, True),
        "activation_checkpointing": (False, True),
        "precision": ("fp32", "bf16"),
    }

    precision: str = attrs.field(
        default="fp32",
        validator=attrs.validators.in_(("fp32", "bf16")),
    )
    """fp32: everything in float32. bf16: compute in bfloat16; a trained role keeps float32 masters
    and reduces gradients in float32, a frozen one stores bfloat16."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory for about a third more
    time. On CUDA it is off for models of at most 0.5 billion parameters."""
    cpu_offload: bool = False
    """FSDP2's CPUOffloadPolicy: shards of weights, gradients and optimizer are on the CPU all the
    time."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass (as ZeRO-3 does). False keeps them
    until the backward pass (as ZeRO-2 does)."""
    replicas: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """HSDP: the number of groups that the dp ranks are cut into. Weights are sharded inside a group
    and replicated over groups."""
    wrap_min_parameters: int = 10_000_000
    """Layers of at least this many parameters are gathered one by one, smaller ones together with
    the root: each wrapped layer costs about 1 ms per forward and backward pass."""
    compile: bool = False
    """Compile each decoder layer with torch.compile."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the model's own weights; needs peft, and tp 1."""

    @property
    def varies(self) -> str:
        """Say that compiled layers vary: their kernels are chosen by speed."""
        return "compile = true chooses kernels by their speed" if self.compile else ""

    def sharding(self, trained: bool) -> FullyShardedLayers:
        """Describe the backend's sharding with these settings for memory and time estimates."""
        wide = self.precision == "fp32" or (trained and self.lora is None)
        return FullyShardedLayers(
            weight_bytes=4 if wide else 2,
            optimizer_bytes=8,
            compute_bytes=4 if self.precision == "fp32" else 2,
            recompute=self.activation_checkpointing,
            replicas=self.replicas,
            keeps_gathered=not self.reshard_after_forward,
            whole_below=self.wrap_min_parameters,
            plain_alone=self.precision == "fp32" and not self.cpu_offload,
            on_host=self.cpu_offload,
            adapter_rank=self.lora.rank if self.lora and trained else 0,
        )

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Return whether the layout has dp and tp alone, and tp suits a dense model's sizes."""
        # Tensor parallelism cuts heads, MLP units and vocabulary.
        sizes = (shape.heads, shape.kv_heads, shape.intermediate, shape.vocab)
        uneven = any(size % layout.tp for size in sizes)
        tp_fits = layout.tp == 1 or not (shape.experts or self.lora or uneven)

        # There is neither pipeline nor context parallelism, and replicas are equally large.
        if layout.pp != 1 or layout.cp != 1:
            return False
        return tp_fits and layout.dp % self.replicas == 0

    def planned_layout(
        self, shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Return the boxes that `FSDPBackend.layout` will have, from the shapes alone."""
        params = shape.params(dtype)

        # Tensor parallelism cuts first, FSDP then cuts each part.
        def tensor(name: str, tp_rank: int) -> Box:
            return tensor_shard(name, params[name].shape, shape, layout.tp, tp_rank)

        return fsdp_layout(params, layout, self.replicas, tensor, shape.ties)
