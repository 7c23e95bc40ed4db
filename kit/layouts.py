"""Layouts of weights as pure functions of shapes.

They cover Megatron's 3D and expert parallelism, rollout engines' tensor and pipeline parallelism,
FSDP2's shards, and ZeRO's flat ranges. Planning with them needs no backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout
from hybridflow.core.values.weights import Box, Param, Shards, WeightLayout

_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"experts\.(\d+)\.(.*)$")

# How tensor parallelism cuts a parameter, by the last two parts of its name.
_HEADS = ("q_proj.weight", "q_proj.bias")
_KV_HEADS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_ROWS = ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")
_COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@attrs.frozen
class ModelPart:
    """A rank's coordinates: its pipeline stage, tensor and expert rank."""

    pp: int = 0
    """Pipeline stage."""
    tp: int = 0
    """Tensor rank."""
    ep: int = 0
    """Expert rank."""


def tensor_shard(
    name: str,
    shape: Sequence[int],
    shape_of: ModelShape,
    tp: int,
    at: int,
    vocab_multiple: int = 1,
) -> Box:
    """Return the box that tensor rank `at` of `tp` holds of a parameter.

    This is Megatron's cut (arXiv:1909.08053), which vLLM and SGLang share. Projections into heads
    and intermediate units are cut by rows, those out of them by columns. Embedding and head are cut
    over the vocabulary, padded to a multiple of `vocab_multiple` on each rank (no box reaches into
    the padding). Other parameters are on every rank. With fewer key/value heads than ranks,
    neighbouring ranks hold the same head.
    """
    tail = name.rsplit(".", 2)
    key = ".".join(tail[-2:])
    full = Box.full(shape)
    if tp == 1:
        return full

    if key in _KV_HEADS and shape_of.kv_heads < tp:
        # Fewer heads than ranks: a whole head each, which neighbours share.
        head = at * shape_of.kv_heads // tp
        width = shape_of.head_dim
        return Box.part(shape, 0, head * width, (head + 1) * width)

    if key in _HEADS or key in _KV_HEADS or key in _ROWS:
        size = shape[0] // tp
        start = at * size
        return Box.part(shape, 0, start, start + size)

    if key in _COLUMNS:
        size = shape[1] // tp
        start = at * size
        return Box.part(shape, 1, start, start + size)

    if key in _VOCABULARY:
        # The last ranks may hold less than `size` rows, or none: the rest is padding.
        size = -(-shape[0] // (vocab_multiple * tp)) * vocab_multiple
        start = min(at * size, shape[0])
        stop = min((at + 1) * size, shape[0])
        return Box.part(shape, 0, start, stop)

    return full


def stage_of_layer(layers: int, pp: int, vpp: int = 1) -> list[int]:
    """Return the pipeline stage of each layer.

    With `vpp` virtual stages the layers are cut into pp * vpp chunks, and chunk c is on pipeline
    stage c % pp (the interleaved schedule of arXiv:2104.04473). Raises ConfigError where the chunks
    would differ in size.
    """
    if layers % (pp * vpp):
        raise ConfigError([f"{layers} layers do not divide into {pp} stages of {vpp} chunks"])

    # Chunks of `size` layers are dealt out to the pipeline stages in turn.
    size = layers // (pp * vpp)
    return [layer // size % pp for layer in range(layers)]


def placed_layout(
    shape: ModelShape,
    params: Mapping[str, Param],
    places: Mapping[int, ModelPart],
    *,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    vpp: int = 1,
    vocab_multiple: int = 1,
    opaque: Iterable[str] = (),
) -> WeightLayout:
    """Return the layout of a transformer whose ranks have the coordinates `places`.

    A tied embedding is held by the first and the last pipeline stage, which computes the logits
    with it. Raises ConfigError for sizes that do not divide.
    """
    problems = shape.tensor_parallel_problems(tp)
    if shape.experts and shape.experts % ep:
        problems.append(f"ep {ep} does not divide the {shape.experts} experts")
    if problems:
        raise ConfigError(problems)

    # Ranks with equal coordinates hold the same boxes, so shards are computed once for each.
    stages = stage_of_layer(shape.layers, pp, vpp)
    ranks_at: dict[ModelPart, list[int]] = {}
    for rank, place in places.items():
        ranks_at.setdefault(place, []).append(rank)

    def holders(name: str) -> tuple[str, tuple[int, ...], int | None]:
        """Return (name inside layer and expert, pipeline stages, expert rank or None for all)."""
        # Layers are spread over the pipeline stages; other parameters are on the first or the last.
        match = _LAYER.match(name)
        inner = match[2] if match else name
        if match:
            on_stages: tuple[int, ...] = (stages[int(match[1])],)
        elif "embed_tokens" in name:
            on_stages = (0, pp - 1) if shape.tied else (0,)
        else:
            on_stages = (pp - 1,)

        # Neighbouring experts are on one expert rank.
        owner = None
        if expert := _EXPERT.search(inner):
            owner = int(expert[1]) * ep // shape.experts
            inner = expert[2]
        return inner, on_stages, owner

    # Layers repeat, so most parameters find their shards here.
    memo: dict[tuple, Shards] = {}

    def shards(name: str, param: Param) -> Shards:
        inner, on_stages, owner = holders(name)
        key = (inner, param.shape, on_stages, owner)
        if key not in memo:
            boxes: dict[int, tuple[Box, ...]] = {}
            for place, ranks in ranks_at.items():
                if place.pp in on_stages and owner in (None, place.ep):
                    box = tensor_shard(inner, param.shape, shape, tp, place.tp, vocab_multiple)
                    boxes |= dict.fromkeys(ranks, (box,) if box.numel else ())
            memo[key] = boxes
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
    """Return Megatron's training layout, in canonical names.

    Its fused `linear_qkv` (interleaved by key/value group) and `linear_fc1` (gate, then up) hold
    contiguous rows of the canonical projections. dp and cp ranks hold copies; experts are spread
    over ep.
    """
    # dp and cp ranks have equal coordinates: they hold copies.
    places = {}
    for rank in range(layout.world):
        coords = layout.coords(rank)
        places[rank] = ModelPart(coords.pp, coords.tp, coords.ep)
    return placed_layout(
        shape,
        params or shape.params(),
        places,
        pp=layout.pp,
        tp=layout.tp,
        ep=layout.ep,
        vpp=vpp,
        vocab_multiple=vocab_multiple,
    )


def engine_layout(
    shape: ModelShape,
    generation: GenerationLayout,
    params: Mapping[str, Param] | None = None,
    vocab_multiple: int = 1,
    opaque: Iterable[str] = (),
) -> WeightLayout:
    """Return a rollout engine's layout of the weights on the ranks of a generation layout.

    `opaque` names parameters whose storage the engine does not show.
    """
    # Replicas hold the same, pipeline stage by pipeline stage.
    places = {}
    for replica in generation.replicas:
        for stage, ranks in enumerate(replica):
            for position, rank in enumerate(ranks):
                places[rank] = ModelPart(stage, position)
    return placed_layout(
        shape,
        params or shape.params(),
        dict(sorted(places.items())),
        pp=generation.pp,
        tp=generation.tp,
        vocab_multiple=vocab_multiple,
        opaque=opaque,
    )


def chunked(
    box: Box,
    dim: int,
    parts: int,
    at: int,
) -> Box:
    """Return part `at` of a box that is cut into `parts` along `dim`.

    The cut is that of torch.chunk: the last parts may be smaller, or empty.
    """
    size = -(-box.shape[dim] // parts)
    start = min(box.start[dim] + size * at, box.stop[dim])
    stop = min(box.start[dim] + size * at + size, box.stop[dim])
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
    """Return FSDP2's layout: each parameter's dim 0 over the dp ranks of an HSDP replica.

    `tensor(name, tp_rank)` returns the box of a tensor-parallel rank, which FSDP cuts; without it
    tp ranks hold copies.
    """
    # Ranks of one HSDP replica that cut a parameter; further replicas hold copies.
    shard = layout.dp // replicas
    memo: dict[tuple, Shards] = {}

    def tensor_boxes(name: str, param: Param) -> tuple[Box, ...]:
        """Return one box per tp rank."""
        if tensor is None:
            return (Box.full(param.shape),) * layout.tp
        return tuple(tensor(name, tp_rank) for tp_rank in range(layout.tp))

    def shards(name: str, param: Param) -> Shards:
        cut = tensor_boxes(name, param)
        key = (param.shape, cut)
        if key not in memo:
            held = {}
            for rank in range(layout.world):
                coords = layout.coords(rank)

                # A scalar has no dim 0 to cut: every rank holds it.
                box = cut[coords.tp]
                if param.shape:
                    box = chunked(box, 0, shard, coords.dp % shard)
                held[rank] = (box,) if box.numel else ()
            memo[key] = held
        return memo[key]

    held_by_name = {name: shards(name, param) for name, param in params.items()}
    return WeightLayout.by_name(params, held_by_name, range(layout.world), ties)


def zero3_layout(
    params: Mapping[str, Param],
    world: int,
    ties: Mapping[str, str] | None = None,
) -> WeightLayout:
    """Return DeepSpeed's ZeRO-3 layout: each parameter's elements in `world` equal flat ranges.

    The last range is padded.
    """
    # Every parameter is cut separately, so equal shapes have equal shards.
    memo: dict[tuple[int, ...], Shards] = {}
    for param in params.values():
        if param.shape not in memo:
            size = -(-param.numel // world)
            ranges = _equal_ranges(size, range(world))
            memo[param.shape] = _flat_shards(param, ranges)
    held = {name: memo[param.shape] for name, param in params.items()}
    return WeightLayout.by_name(params, held, range(world), ties)


def flat_layout(
    params: Mapping[str, Param],
    world: int,
    ties: Mapping[str, str] | None = None,
) -> WeightLayout:
    """Return the layout of one flat buffer of all parameters, cut into `world` equal ranges.

    The parameters are concatenated. ZeRO-1 and ZeRO-2 keep master weights like this.
    """
    # The buffer is cut, not each parameter: a range may begin within one and end within another.
    total = sum(param.numel for param in params.values())
    size = -(-total // world)
    held = {}
    offset = 0
    for name, param in params.items():
        # The ranks whose ranges overlap with this parameter.
        first = offset // size
        last = min(-(-(offset + param.numel) // size), world)
        ranges = _equal_ranges(size, range(first, last), offset)
        held[name] = _flat_shards(param, ranges)
        offset += param.numel
    return WeightLayout.by_name(params, held, range(world), ties)


def _equal_ranges(
    size: int,
    ranks: Iterable[int],
    offset: int = 0,
) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, stop) of equal ranges, counted from `offset`."""
    for rank in ranks:
        yield rank, rank * size - offset, (rank + 1) * size - offset


def _flat_shards(param: Param, ranges: Iterable[tuple[int, int, int]]) -> Shards:
    """Return rank -> boxes of the parameter's elements in its range, clipped to the parameter."""
    full = Box.full(param.shape)
    shards = {}
    for rank, start, stop in ranges:
        first = max(start, 0)
        last = min(stop, param.numel)
        shards[rank] = tuple(full.flat_range(first, last))
    return shards
