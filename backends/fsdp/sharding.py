"""Tensor parallelism and FSDP2 applied to a role's model, and where each parameter's pieces are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.fsdp.modeling import RoleModel
from hybridflow.core.errors import ModelError
from hybridflow.core.parallel import ParallelLayout
from hybridflow.core.weights import Box

COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


def device_mesh(layout: ParallelLayout, replicas: int, device: torch.device) -> DeviceMesh:
    """Axes replicate, shard, tp, over the layout's own rank order (tp fastest, or dp with order "dp-...")."""
    shard = layout.dp // replicas
    ranks = [
        [[layout.rank(dp=r * shard + s, tp=t) for t in range(layout.tp)] for s in range(shard)] for r in range(replicas)
    ]
    return DeviceMesh(device.type, torch.tensor(ranks), mesh_dim_names=("replicate", "shard", "tp"))


def apply_tensor_parallel(model: RoleModel, mesh: DeviceMesh) -> None:
    """Megatron's split (arXiv:1909.08053) of Llama-like layers; embedding and head split over the vocabulary."""
    config, trunk = model.hf.config, model.hf.base_model
    tp = mesh.size()
    layers = getattr(trunk, "layers", None)
    if layers is None or not all(_has(layers[0], name) for name in (*COLWISE, *ROWWISE)):
        raise ModelError(
            f"tp {tp} needs a Llama-like model (q_proj ... down_proj); {config.model_type!r} is not one: set layout.tp = 1"
        )
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % tp or kv % tp:
        raise ModelError(f"tp {tp} must divide the attention heads ({heads}) and key-value heads ({kv})")
    for layer in layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLWISE} | {
            name: RowwiseParallel() for name in ROWWISE
        }
        parallelize_module(layer, mesh, plan)
    parallelize_module(trunk, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if model.kind == "policy":
        tied = model.head.weight is trunk.embed_tokens.weight or getattr(config, "tie_word_embeddings", False)
        parallelize_module(model.hf, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        if tied:
            model.head.weight = trunk.embed_tokens.weight


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def apply_fsdp(model: RoleModel, mesh: DeviceMesh, config: FSDPConfig) -> None:
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if config.replicas > 1 else mesh["shard"],
        "reshard_after_forward": config.reshard_after_forward,
    }
    if config.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in getattr(model.hf.base_model, "layers", []):
        if sum(p.numel() for p in layer.parameters()) >= config.wrap_min_parameters:
            fully_shard(layer, **options)
    fully_shard(model, **options)


def boxes_of(shape: torch.Size, mesh: DeviceMesh | None, placements: Any, world: int) -> dict[int, tuple[Box, ...]]:
    """rank -> the box of a parameter that it holds."""
    if mesh is None:
        return {rank: (Box.full(shape),) for rank in range(world)}
    held: dict[int, tuple[Box, ...]] = {}
    for place, rank in zip(_indices(mesh.mesh.shape), mesh.mesh.flatten().tolist(), strict=True):
        size, offset = _compute_local_shape_and_global_offset(shape, tuple(mesh.mesh.shape), list(place), placements)
        box = Box(tuple(offset), tuple(o + s for o, s in zip(offset, size, strict=True)))
        held[rank] = (box,) if box.numel else ()
    return held


def _indices(shape: torch.Size) -> list[tuple[int, ...]]:
    return [tuple(int(i) for i in torch.unravel_index(torch.tensor(n), shape)) for n in range(shape.numel())]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(tensor: torch.Tensor, world: int) -> int:
    """On how many of the group's ranks each element stands."""
    if not isinstance(tensor, DTensor):
        return world
    shards = 1
    for size, placement in zip(tensor.device_mesh.mesh.shape, tensor.placements, strict=True):
        shards *= size if placement.is_shard() or type(placement).__name__ == "_StridedShard" else 1
    return world // shards
