"""Configuration of the FSDP2 training backend."""

from __future__ import annotations

import attrs

from hybridflow.core.huggingface.config import LoRAConfig
from hybridflow.core.parallel import ParallelLayout
from hybridflow.core.resharding.shapes import ModelShape
from hybridflow.core.storage import Storage


@attrs.frozen
class FSDPConfig:
    """PyTorch FSDP2 on Hugging Face models."""

    precision: str = attrs.field(default="fp32", validator=attrs.validators.in_(("fp32", "bf16")))
    """fp32: everything in float32. bf16: compute in bfloat16; a trained role keeps float32 masters and reduces
    gradients in float32, a frozen one stores bfloat16."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward: memory for about a third more time."""
    cpu_offload: bool = False
    """FSDP2's CPUOffloadPolicy: shards of weights, gradients and optimizer live on the CPU all the time."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward (ZeRO-3); False keeps them until the backward (ZeRO-2)."""
    replicas: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """HSDP: dp ranks are cut into this many groups; weights are sharded inside a group and replicated over groups."""
    wrap_min_parameters: int = 10_000_000
    """Layers are wrapped one by one from this many parameters per layer on; smaller ones together with the root, since
    each wrapped layer costs about 1 ms per forward and backward."""
    compile: bool = False
    """torch.compile of each decoder layer."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the model's own weights; needs peft, and tp 1."""

    def storage(self, trained: bool) -> Storage:
        """For `hybridflow plan`."""
        wide = self.precision == "fp32" or (trained and self.lora is None)
        return Storage(
            sharding="fsdp",
            weight_bytes=4 if wide else 2,
            optimizer_bytes=8,
            compute_bytes=4 if self.precision == "fp32" else 2,
            recompute=self.activation_checkpointing,
            replicas=self.replicas,
            keeps_gathered=not self.reshard_after_forward,
            whole_below=self.wrap_min_parameters,
            on_host=self.cpu_offload,
            gathers_logits=True,
            adapter_rank=self.lora.rank if self.lora and trained else 0,
        )

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """For `hybridflow plan`: whether a model of this shape can be laid out so."""
        sizes = (shape.heads, shape.kv_heads, shape.intermediate, shape.vocab)
        whole = layout.tp == 1 or not (shape.experts or self.lora or any(size % layout.tp for size in sizes))
        return whole and layout.pp == 1 and layout.dp % self.replicas == 0
