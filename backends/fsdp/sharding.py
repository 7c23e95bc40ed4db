"""Tensor parallelism and FSDP2 applied to a role's model, and where each parameter's pieces are."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.modeling import RoleModel
from hybridflow.kit.layouts import chunked

COLWISE = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


def device_mesh(layout: ParallelLayout, replicas: int, device: torch.device) -> DeviceMesh:
    """Axes replicate (if there are several), shard and tp (if it is cut), over the layout's own rank order.

    Roles of one process with one shape share a mesh: each of its process groups costs threads, or memory of the GPU.
    """
    shard = layout.dp // replicas
    ranks = torch.tensor(
        [
            [[layout.rank(dp=r * shard + s, tp=t) for t in range(layout.tp)] for s in range(shard)]
            for r in range(replicas)
        ]
    )
    names = ["replicate", "shard", "tp"]
    for dim, name, size in ((2, "tp", layout.tp), (0, "replicate", replicas)):
        if size == 1:
            ranks = ranks.squeeze(dim)
            names.remove(name)
    return _shared_mesh(
        tuple(ranks.flatten().tolist()),
        tuple(ranks.shape),
        tuple(names),
        device.type,
        dist.group.WORLD,
    )


@functools.cache
def _shared_mesh(
    ranks: tuple, shape: tuple, names: tuple, device: str, world: dist.ProcessGroup
) -> DeviceMesh:
    return DeviceMesh(device, torch.tensor(ranks).view(shape), mesh_dim_names=names)


def replica_group(
    layout: ParallelLayout, replicas: int, rank: int
) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks, in order, that hold all weights together with this one (an HSDP replica's), and their group."""
    shard = layout.dp // replicas
    members: list[list[int]] = [[] for _ in range(replicas)]
    for other in range(layout.world):
        members[layout.coords(other).dp // shard].append(other)
    mine = layout.coords(rank).dp // shard
    return members[mine], _shared_groups(tuple(map(tuple, members)), dist.group.WORLD)[
        mine
    ] if replicas > 1 else None


@functools.cache
def _shared_groups(
    members: tuple[tuple[int, ...], ...], world: dist.ProcessGroup
) -> list[dist.ProcessGroup]:
    return [dist.new_group(list(ranks)) for ranks in members]


def apply_tensor_parallel(model: RoleModel, mesh: DeviceMesh) -> None:
    """Megatron's split (arXiv:1909.08053) of Llama-like layers; embedding and head split over the vocabulary.

    Raises ModelError for a model of another build, or whose sizes the number of ranks does not divide.
    """
    config, trunk = model.hf.config, model.hf.base_model
    tp, policy = mesh.size(), model.kind == "policy"
    layers = getattr(trunk, "layers", None)
    if layers is None or not all(_has(layers[0], name) for name in (*COLWISE, *ROWWISE)):
        raise ModelError(
            f"tp {tp} needs a Llama-like model (q_proj ... down_proj); {config.model_type!r} is not one: "
            "set layout.tp = 1"
        )
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    if bad := [f"{name} {getattr(config, name)}" for name in names if getattr(config, name) % tp]:
        raise ModelError(
            f"tp {tp} must divide the model's {', '.join(bad)}; choose a smaller layout.tp"
        )
    tied = policy and model.head.weight is trunk.embed_tokens.weight
    for layer in layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLWISE}
        plan |= {name: RowwiseParallel() for name in ROWWISE}
        parallelize_module(layer, mesh, plan)
    parallelize_module(trunk, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if policy:
        parallelize_module(model.hf, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        if tied:
            model.head.weight = trunk.embed_tokens.weight


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def apply_fsdp(model: RoleModel, mesh: DeviceMesh, config: FSDPConfig) -> list[FSDPModule]:
    """The modules that FSDP gathers one by one: large layers, and the root with all that is left.

    The root's weights stay gathered until the backward, which begins with them.
    """
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if config.replicas > 1 else mesh["shard"]
    }
    if config.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    large: list[nn.Module] = [
        layer
        for layer in getattr(model.hf.base_model, "layers", [])
        if sum(p.numel() for p in layer.parameters()) >= config.wrap_min_parameters
    ]
    for layer in large:
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    return [m for m in (*large, model) if isinstance(m, FSDPModule)]


def boxes_of(parameter: torch.Tensor, layout: ParallelLayout, replicas: int) -> dict[int, Box]:
    """rank -> the box of a parameter that it holds (of no elements, perhaps).

    Tensor parallelism cuts first, FSDP then cuts each rank's piece, both as torch.chunk does.
    """
    axes = _sharded_axes(parameter)
    shard = layout.dp // replicas
    held = {}
    for rank in range(layout.world):
        at = layout.coords(rank)
        box = Box.full(parameter.shape)
        for axis, index, size in (("tp", at.tp, layout.tp), ("shard", at.dp % shard, shard)):
            if axis in axes:
                box = chunked(box, axes[axis], size, index)
        held[rank] = box
    return held


def _sharded_axes(parameter: torch.Tensor) -> dict[str, int]:
    """Mesh axis -> the tensor dim that it cuts. (A parameter cut twice in dim 0 has a _StridedShard.)"""
    if not isinstance(parameter, DTensor):
        return {}
    named = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return {name: int(p.dim) for name, p in named if hasattr(p, "dim")}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece, as a plain tensor that shares its storage."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def copies(parameter: torch.Tensor, layout: ParallelLayout, replicas: int) -> int:
    """On how many of the group's ranks each element stands."""
    axes = _sharded_axes(parameter)
    shards = (layout.tp if "tp" in axes else 1) * (layout.dp // replicas if "shard" in axes else 1)
    return layout.world // shards
