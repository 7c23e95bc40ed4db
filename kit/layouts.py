"""Layouts of weights as pure functions of shapes: Megatron's 3D and expert parallelism, rollout engines' tensor and
pipeline parallelism, FSDP2's shards, ZeRO's flat ranges. No backend is needed to plan with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.core.values.weights import Box, Param, Shards, WeightLayout

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"experts\.(\d+)\.(.*)$")
_HEADS = ("q_proj.weight", "q_proj.bias")
_KV_HEADS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_ROWS = ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")
_COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@attrs.frozen
class Place:
    """Which part of the model a rank has: pipeline stage, tensor-parallel and expert-parallel rank."""

    pp: int = 0
    tp: int = 0
    ep: int = 0


def tensor_shard(
    name: str, shape: Sequence[int], shape_of: ModelShape, tp: int, at: int, vocab_multiple: int = 1
) -> Box:
    """Rank `at`'s part of a parameter under Megatron's tensor parallelism (arXiv:1909.08053), which vLLM and SGLang share.

    Projections into heads and intermediate units are cut by rows, those out of them by columns, embedding and head over
    the vocabulary (which may be padded to a multiple; no box reaches into the padding), the rest is on every rank. With
    fewer key/value heads than ranks, neighbouring ranks hold the same head.
    """
    tail = name.rsplit(".", 2)
    key = ".".join(tail[-2:])
    whole = Box.full(shape)
    if tp == 1:
        return whole
    if key in _KV_HEADS and shape_of.kv_heads < tp:
        head = at * shape_of.kv_heads // tp
        return Box.part(shape, 0, head * shape_of.head_dim, (head + 1) * shape_of.head_dim)
    if key in _HEADS or key in _KV_HEADS or key in _ROWS:
        size = shape[0] // tp
        return Box.part(shape, 0, at * size, (at + 1) * size)
    if key in _COLUMNS:
        size = shape[1] // tp
        return Box.part(shape, 1, at * size, (at + 1) * size)
    if key in _VOCABULARY:
        size = -(-shape[0] // (vocab_multiple * tp)) * vocab_multiple
        return Box.part(shape, 0, min(at * size, shape[0]), min((at + 1) * size, shape[0]))
    return whole


def stage_of_layer(layers: int, pp: int, vpp: int = 1) -> list[int]:
    """Layer -> pipeline stage. With `vpp` virtual stages, chunk c of the layers is on stage c % pp (interleaved)."""
    if layers % (pp * vpp):
        raise ConfigError([f"{layers} layers do not divide into {pp} stages of {vpp} chunks"])
    size = layers // (pp * vpp)
    return [layer // size % pp for layer in range(layers)]


def placed_layout(
    shape: ModelShape,
    params: Mapping[str, Param],
    places: Mapping[int, Place],
    *,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    vpp: int = 1,
    vocab_multiple: int = 1,
    opaque: Iterable[str] = (),
) -> WeightLayout:
    """The layout of a transformer whose ranks have the given places. Raises ConfigError for sizes that do not divide.

    A tied embedding is held by the first and the last stage (which computes the logits with it).
    """
    problems = shape.tensor_parallel_problems(tp)
    if shape.experts and shape.experts % ep:
        problems.append(f"ep {ep} does not divide the {shape.experts} experts")
    if problems:
        raise ConfigError(problems)
    stages = stage_of_layer(shape.layers, pp, vpp)
    ranks_at: dict[Place, list[int]] = {}
    for rank, place in places.items():
        ranks_at.setdefault(place, []).append(rank)
    memo: dict[tuple, Shards] = {}

    def shards(name: str, param: Param) -> Shards:
        match = _LAYER.match(name)
        rest = match[2] if match else name
        if match:
            on: tuple[int, ...] = (stages[int(match[1])],)
        elif "embed_tokens" in name:
            on = (0, pp - 1) if shape.tied else (0,)
        else:
            on = (pp - 1,)
        owner = None
        if expert := _EXPERT.search(rest):
            owner, rest = int(expert[1]) * ep // shape.experts, expert[2]
        key = (rest, param.shape, on, owner)
        if key not in memo:
            memo[key] = {
                rank: (box,) if box.numel else ()
                for place, ranks in ranks_at.items()
                if place.pp in on and owner in (None, place.ep)
                for box in (tensor_shard(rest, param.shape, shape, tp, place.tp, vocab_multiple),)
                for rank in ranks
            }
        return memo[key]

    held = {name: shards(name, param) for name, param in params.items()}
    return WeightLayout.by_name(params, held, places, shape.ties, opaque)


def megatron_layout(
    shape: ModelShape,
    layout: ParallelLayout,
    params: Mapping[str, Param] | None = None,
    vpp: int = 1,
    vocab_multiple: int = 128,
) -> WeightLayout:
    """Megatron's training layout: fused `linear_qkv` (interleaved by key/value group) and `linear_fc1` (gate, then up) hold
    contiguous rows of the canonical projections; dp and cp ranks hold copies, experts are spread over ep."""
    places = {}
    for rank in range(layout.world):
        at = layout.coords(rank)
        places[rank] = Place(at.pp, at.tp, at.ep)
    return placed_layout(
        shape, params or shape.params(), places, pp=layout.pp, tp=layout.tp, ep=layout.ep, vpp=vpp,
        vocab_multiple=vocab_multiple,
    )  # fmt: skip


def engine_layout(
    shape: ModelShape,
    generation: GenerationLayout,
    params: Mapping[str, Param] | None = None,
    vocab_multiple: int = 1,
    opaque: Iterable[str] = (),
) -> WeightLayout:
    """What a rollout engine with tensor and pipeline parallelism holds on the ranks of a generation layout."""
    places = {
        rank: Place(stage, at)
        for replica in generation.replicas
        for stage, ranks in enumerate(replica)
        for at, rank in enumerate(ranks)
    }
    return placed_layout(
        shape, params or shape.params(), dict(sorted(places.items())), pp=generation.pp, tp=generation.tp,
        vocab_multiple=vocab_multiple, opaque=opaque,
    )  # fmt: skip


def chunked(box: Box, dim: int, parts: int, at: int) -> Box:
    """Part `at` of `parts` of a box along `dim`, cut as torch.chunk does: the last parts may be smaller, or nothing."""
    size = -(-box.shape[dim] // parts)
    start, stop = (min(box.start[dim] + size * i, box.stop[dim]) for i in (at, at + 1))
    return Box(
        (*box.start[:dim], start, *box.start[dim + 1 :]),
        (*box.stop[:dim], stop, *box.stop[dim + 1 :]),
    )


def fsdp_layout(
    params: Mapping[str, Param],
    layout: ParallelLayout,
    replicas: int = 1,
    tensor: Callable[[str, int], Box] | None = None,
    ties: Mapping[str, str] | None = None,
) -> WeightLayout:
    """FSDP2: dim 0 of every parameter over the dp ranks of an HSDP replica, after tensor parallelism (`tensor(name, tp)`)."""
    shard = layout.dp // replicas
    memo: dict[tuple, Shards] = {}

    def shards(name: str, param: Param) -> Shards:
        cut = (
            tuple(tensor(name, t) for t in range(layout.tp))
            if tensor
            else (Box.full(param.shape),) * layout.tp
        )
        if (param.shape, cut) not in memo:
            held = {}
            for rank in range(layout.world):
                at = layout.coords(rank)
                box = chunked(cut[at.tp], 0, shard, at.dp % shard) if param.shape else cut[at.tp]
                held[rank] = (box,) if box.numel else ()
            memo[param.shape, cut] = held
        return memo[param.shape, cut]

    return WeightLayout.by_name(
        params, {n: shards(n, p) for n, p in params.items()}, range(layout.world), ties
    )


def zero3_layout(
    params: Mapping[str, Param], world: int, ties: Mapping[str, str] | None = None
) -> WeightLayout:
    """DeepSpeed's ZeRO-3: each parameter's elements in `world` equal flat ranges, the last of them padded."""
    memo: dict[tuple[int, ...], Shards] = {}
    for param in params.values():
        if param.shape not in memo:
            whole, size = Box.full(param.shape), -(-param.numel // world)
            memo[param.shape] = {
                r: tuple(
                    whole.flat_range(min(r * size, param.numel), min((r + 1) * size, param.numel))
                )
                for r in range(world)
            }
    return WeightLayout.by_name(
        params, {n: memo[p.shape] for n, p in params.items()}, range(world), ties
    )


def flat_layout(
    params: Mapping[str, Param], world: int, ties: Mapping[str, str] | None = None
) -> WeightLayout:
    """One flat buffer of all parameters, one behind the other, in `world` equal ranges (ZeRO-1/2's master weights)."""
    size = -(-sum(p.numel for p in params.values()) // world)
    held, at = {}, 0
    for name, param in params.items():
        whole = Box.full(param.shape)
        held[name] = {
            r: tuple(whole.flat_range(max(r * size - at, 0), min((r + 1) * size - at, param.numel)))
            for r in range(at // size, min(-(-(at + param.numel) // size), world))
        }
        at += param.numel
    return WeightLayout.by_name(params, held, range(world), ties)
