"""Tensor parallelism and FSDP2 applied to a role's model, and where each parameter's shards are.

The device mesh has up to three axes. tp cuts a parameter first, FSDP then cuts each tp rank's part
along dim 0 over the axis shard; replicate (HSDP) has copies:

    dp rank       0         1         2         3          layout.dp = 4, replicas = 2, tp = 2
    replicate     0         0         1         1
    shard         0         1         0         1
    tp           0 1       0 1       0 1       0 1
"""

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
from hybridflow.backends.fsdp.fit import COLWISE, ROWWISE, why_not_cut
from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.modeling import RoleModel
from hybridflow.kit.layouts import chunked
from hybridflow.kit.vocabulary import VocabularyPart


def device_mesh(layout: ParallelLayout, replicas: int, device: torch.device) -> DeviceMesh:
    """Return the mesh with axes replicate (if replicas > 1), shard and tp (if tp > 1).

    Ranks are in the layout's own order. Roles of one process with the same shape share a mesh,
    since each of its process groups costs threads, or memory of the GPU.
    """
    shard = layout.dp // replicas
    ranks = torch.empty((replicas, shard, layout.tp), dtype=torch.int64)
    for replica in range(replicas):
        for position in range(shard):
            for tp in range(layout.tp):
                rank = layout.rank(dp=replica * shard + position, tp=tp)
                ranks[replica, position, tp] = rank

    # Drop tp and replicate where they have one rank alone, the last axis first.
    names = ["replicate", "shard", "tp"]
    if layout.tp == 1:
        ranks = ranks.squeeze(2)
        names.remove("tp")
    if replicas == 1:
        ranks = ranks.squeeze(0)
        names.remove("replicate")

    return _shared_mesh(
        tuple(ranks.flatten().tolist()),
        tuple(ranks.shape),
        tuple(names),
        device.type,
        dist.group.WORLD,
    )


@functools.cache
def _shared_mesh(
    ranks: tuple,
    shape: tuple,
    names: tuple,
    device: str,
    world: dist.ProcessGroup,
) -> DeviceMesh:
    """Return a mesh, cached per process. `world` is part of the key: a new job has new groups."""
    return DeviceMesh(device, torch.tensor(ranks).view(shape), mesh_dim_names=names)


def replica_group(
    layout: ParallelLayout,
    replicas: int,
    rank: int,
) -> tuple[list[int], dist.ProcessGroup | None]:
    """Return the ranks of this rank's HSDP replica, in order, and their process group.

    Together they hold all weights. With one replica the group is None, the default group.
    Collective.
    """
    # Neighbouring dp ranks form a replica, all of them with all their tp ranks.
    shard = layout.dp // replicas
    members: list[list[int]] = [[] for _ in range(replicas)]
    for other in range(layout.world):
        members[layout.coords(other).dp // shard].append(other)

    # With one replica the default group has just these ranks.
    replica = layout.coords(rank).dp // shard
    group = None
    if replicas > 1:
        groups = _shared_groups(tuple(map(tuple, members)), dist.group.WORLD)
        group = groups[replica]
    return members[replica], group


@functools.cache
def _shared_groups(
    members: tuple[tuple[int, ...], ...],
    world: dist.ProcessGroup,
) -> list[dist.ProcessGroup]:
    """Return process groups, cached per process; `world` is a part of the key (`_shared_mesh`)."""
    return [dist.new_group(list(ranks)) for ranks in members]


def apply_tensor_parallel(model: RoleModel, mesh: DeviceMesh) -> None:
    """Cut Llama-like layers as Megatron does (arXiv:1909.08053), embedding and head by vocabulary.

    Raises ModelError for a model with other layers, or one whose sizes tp does not divide.
    """
    trunk = model.hf.base_model
    policy = model.kind == "policy"
    if problems := why_not_cut(model.hf, mesh.size()):
        raise ModelError("; ".join(problems))
    layers = trunk.layers

    # parallelize_module replaces parameters, so a tie is noted before and made again after.
    tied = policy and model.head.weight is trunk.embed_tokens.weight
    for layer in layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLWISE}
        plan |= {name: RowwiseParallel() for name in ROWWISE}
        parallelize_module(layer, mesh, plan)
    parallelize_module(trunk, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if policy:
        # Logits stay spread: a rank's are [N, V / tp].
        parallelize_module(model.hf, mesh, {"lm_head": ColwiseParallel()})
        vocab = model.hf.config.vocab_size
        first = mesh.get_local_rank() * vocab // mesh.size()
        model.vocabulary_part = VocabularyPart(mesh.get_group(), first, vocab)
        if tied:
            model.head.weight = trunk.embed_tokens.weight


def apply_fsdp(model: RoleModel, mesh: DeviceMesh, config: FSDPConfig) -> list[FSDPModule]:
    """Shard the model in place; return the modules that FSDP gathers one by one, the root last.

    These are the large layers, and the root with all other parameters. The root's weights stay
    gathered until the backward pass, which begins with them.
    """
    options: dict[str, Any] = {}
    if config.replicas > 1:
        options["mesh"] = mesh["replicate", "shard"]
    else:
        options["mesh"] = mesh["shard"]
    if config.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    # Layers are sharded before the root, which gets the other parameters.
    large: list[nn.Module] = []
    for layer in getattr(model.hf.base_model, "layers", []):
        if sum(p.numel() for p in layer.parameters()) >= config.wrap_min_parameters:
            large.append(layer)

    for layer in large:
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    return [module for module in (*large, model) if isinstance(module, FSDPModule)]


def boxes_of(
    parameter: torch.Tensor,
    layout: ParallelLayout,
    replicas: int,
) -> dict[int, Box]:
    """Return for each rank the box of a parameter that it holds, which may be empty.

    Tensor parallelism cuts first, FSDP then cuts each rank's part, both as torch.chunk does.
    """
    axes = _sharded_axes(parameter)
    shard = layout.dp // replicas
    boxes = {}
    for rank in range(layout.world):
        coords = layout.coords(rank)
        box = Box.full(parameter.shape)
        if "tp" in axes:
            box = chunked(box, axes["tp"], layout.tp, coords.tp)
        if "shard" in axes:
            box = chunked(box, axes["shard"], shard, coords.dp % shard)
        boxes[rank] = box
    return boxes


def _sharded_axes(parameter: torch.Tensor) -> dict[str, int]:
    """Return mesh axis -> the tensor dim that it cuts.

    Placements that cut have a `dim`: Shard, and _StridedShard where dim 0 is cut twice.
    """
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ()
    axes = {}
    for name, placement in zip(names, parameter.placements, strict=True):
        if hasattr(placement, "dim"):
            axes[name] = int(placement.dim)
    return axes


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor that shares its storage."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def copies(
    parameter: torch.Tensor,
    layout: ParallelLayout,
    replicas: int,
) -> int:
    """Return the number of ranks of the layout that hold each element of a parameter."""
    # An axis that does not cut the parameter copies it.
    axes = _sharded_axes(parameter)
    shards = 1
    if "tp" in axes:
        shards *= layout.tp
    if "shard" in axes:
        shards *= layout.dp // replicas
    return layout.world // shards
