"""Layouts of models, and the table of the paper (arXiv:2409.19256, table 2) out of the planner."""

from itertools import product

import attrs
import pytest
import torch
from helpers.brute import check_plan, layout, lower_bound, mask
from helpers.paths import matrix

from hybridflow.cli.gather import gather_plan
from hybridflow.core.errors import ConfigError
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.kit.layouts import (
    engine_layout,
    flat_layout,
    fsdp_layout,
    megatron_layout,
    stage_of_layer,
    tensor_shard,
    zero3_layout,
)

M_LAYERS, M_ROWS = 8, 16
M = M_LAYERS * M_ROWS * 3 * 4
SMALL = {"llama": llama_shape(16, 4, 4, 2, 4, 24, 50), "qwen2": llama_shape(16, 4, 4, 4, 4, 24, 53, True, qkv_bias=True),
         "qwen3": llama_shape(16, 4, 8, 4, 2, 24, 53, qk_norm=True),
         "mixtral": llama_shape(16, 4, 4, 2, 4, 24, 50, experts=4, expert_intermediate=8,
                               expert_names="block_sparse_moe")}  # fmt: skip


def even(stage_of, part_of, ranks, pp, tp) -> WeightLayout:
    """A model that divides evenly: layers over stages, rows over tp."""
    per, rows = M_LAYERS // pp, M_ROWS // tp
    held = {
        r: {
            f"l{i}": (Box((part_of[r] * rows, 0), ((part_of[r] + 1) * rows, 3)),)
            for i in range(stage_of[r] * per, (stage_of[r] + 1) * per)
        }
        for r in ranks
    }
    return layout({f"l{i}": (M_ROWS, 3) for i in range(M_LAYERS)}, held)


def train(layout: ParallelLayout) -> WeightLayout:
    at = [layout.coords(r) for r in range(layout.world)]
    return even([c.pp for c in at], [c.tp for c in at], range(layout.world), layout.pp, layout.tp)


def generation(layout: ParallelLayout, pp: int, tp: int, grouping: str) -> WeightLayout:
    groups = generation_layout(layout, pp, tp, grouping)
    where = {
        r: (p, t)
        for replica in groups.replicas
        for p, stage in enumerate(replica)
        for t, r in enumerate(stage)
    }
    ranks = range(layout.world)
    return even([where[r][0] for r in ranks], [where[r][1] for r in ranks], ranks, pp, tp)


CASES = [
    (ParallelLayout(pp=p, tp=t, dp=d, order=order), pg, tg)
    for p, t, d, order in product(
        (1, 2, 4), (1, 2, 4, 8), (1, 2, 4), ("tp-cp-pp-dp", "tp-cp-dp-pp")
    )
    for pg, tg in product((1, 2, 4), (1, 2, 4, 8))
    if p * t > 1 and p % pg == 0 and t % tg == 0 and (p, t) != (pg, tg) and p * t * d <= 64
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0].pp}-{c[0].tp}-{c[0].dp}to{c[1]}-{c[2]}{c[0].order[6]}"
)
def test_row_three_zero_redundancy(case):
    """Received (tp - tg pg)/(tg pg tp) M, peak M/(tg pg), no second copy: on every rank."""
    layout, pg, tg = case
    plan = plan_reshard(train(layout), generation(layout, pg, tg, "zero-redundancy"))
    size = layout.pp * layout.tp
    for rank in range(layout.world):
        assert plan.bytes_received[rank] == M * (size - tg * pg) // (tg * pg * size)
        assert plan.peak_bytes[rank] == M // (tg * pg)
        assert plan.bytes_redundant[rank] == 0
    assert len(set(plan.bytes_sent.values())) == 1


@pytest.mark.parametrize(
    "case", CASES[::3], ids=lambda c: f"{c[0].pp}-{c[0].tp}-{c[0].dp}to{c[1]}-{c[2]}"
)
def test_row_two_gathers_a_replica_and_keeps_a_second_copy(case):
    layout, pg, tg = case
    size = layout.pp * layout.tp
    source, target = train(layout), generation(layout, pg, tg, "consecutive")
    plan = gather_plan(source, target, layout.groups("tp-cp-pp"))
    assert set(plan.bytes_received.values()) == {M * (size - 1) // size}
    assert set(plan.peak_bytes.values()) == {M}
    if (tg > 1 and layout.tp > tg) or (
        pg > 1 and layout.pp > pg
    ):  # else every shard lies in the rank's own part
        assert max(plan.bytes_redundant.values()) == M // size


@pytest.mark.parametrize(("world", "tg"), [(4, 2), (8, 2), (8, 4), (16, 8)])
def test_row_one_gathers_everything_from_flat_shards(world, tg):
    params = {f"l{i}": Param((M_ROWS, 3), torch.float32) for i in range(M_LAYERS)}
    layout = ParallelLayout(dp=world)
    target = generation(layout, 1, tg, "consecutive")
    plan = gather_plan(zero3_layout(params, world), target, [list(range(world))])
    assert set(plan.bytes_received.values()) == {M * (world - 1) // world}
    assert set(plan.peak_bytes.values()) == {M}
    assert max(plan.bytes_redundant.values()) == M // world


TO = [
    pytest.param(1, 1, marks=matrix),
    pytest.param(1, 2, marks=matrix),
    (1, 4),
    pytest.param(2, 1, marks=matrix),
    (2, 2),
]


@pytest.mark.parametrize(("pg", "tg"), TO)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL.keys())
@pytest.mark.parametrize("grouping", ["zero-redundancy", "consecutive"])
def test_real_shapes_receive_the_lower_bound_on_every_rank(shape, pg, tg, grouping):
    params = shape.params(torch.bfloat16)
    sources = {
        "megatron": (
            megatron_layout(shape, ParallelLayout(pp=2, tp=2, dp=2), vocab_multiple=4),
            (2, 2, 2),
        ),
        "megatron order": (
            megatron_layout(shape, ParallelLayout(2, 2, 2, order="tp-cp-dp-pp"), vpp=2),
            (2, 2, 2),
        ),
        "fsdp": (fsdp_layout(params, ParallelLayout(dp=8), ties=shape.ties), (1, 1, 8)),
        "hsdp": (fsdp_layout(params, ParallelLayout(dp=8), 2, ties=shape.ties), (1, 1, 8)),
        "zero3": (zero3_layout(params, 8, shape.ties), (1, 1, 8)),
        "flat": (flat_layout(params, 8, shape.ties), (1, 1, 8)),
    }
    for source, (p, t, d) in sources.values():
        target = engine_layout(shape, generation_layout(ParallelLayout(p, t, d), pg, tg, grouping))
        plan = plan_reshard(source, target)
        check_plan(plan)
        for rank in range(8):
            assert plan.bytes_received[rank] == lower_bound(source, target, rank)
        back = plan_reshard(target, source)
        check_plan(back)


def test_fsdp_with_tensor_parallelism_and_expert_parallelism():
    shape = SMALL["qwen2"]
    params = shape.params()
    cut = lambda name, t: tensor_shard(name, params[name].shape, shape, 2, t)  # noqa: E731
    source = fsdp_layout(params, ParallelLayout(tp=2, dp=4), tensor=cut, ties=shape.ties)
    check_plan(
        plan_reshard(source, engine_layout(shape, generation_layout(ParallelLayout(dp=8), 1, 2)))
    )
    moe = SMALL["mixtral"]
    experts = megatron_layout(moe, ParallelLayout(tp=2, dp=4, ep=2), vocab_multiple=1)
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert {r for r, h in experts.held.items() if h.get(name)} == {2, 3, 6, 7}
    check_plan(
        plan_reshard(
            experts, engine_layout(moe, generation_layout(ParallelLayout(tp=2, dp=4), 1, 1))
        )
    )


def test_fsdp_to_tensor_parallel_engines_receives_less_when_replicas_are_spread():
    """Rows only (no matrix is cut along its columns here): rank i of 8 holds the i-th eighth, and needs one half."""
    shape = SMALL["qwen2"]
    params = {
        name: p
        for name, p in shape.params().items()
        if "q_proj.weight" in name or "up_proj" in name
    }
    source, received = fsdp_layout(params, ParallelLayout(dp=8)), {}
    for grouping in ("zero-redundancy", "consecutive"):
        target = engine_layout(shape, generation_layout(ParallelLayout(dp=8), 1, 2, grouping))
        target = attrs.evolve(
            target,
            params=params,
            held={r: {n: h[n] for n in params} for r, h in target.held.items()},
            ties={},
        )
        plan = plan_reshard(source, target)
        check_plan(plan)
        received[grouping] = [
            plan.bytes_received[rank] * 8 / sum(p.nbytes for p in params.values())
            for rank in range(8)
        ]
    assert received["zero-redundancy"] == [3.0] * 8
    assert received["consecutive"] == [3.0, 4.0, 3.0, 4.0, 4.0, 3.0, 4.0, 3.0]


def test_every_element_is_somewhere_and_padding_is_nowhere():
    for shape in SMALL.values():
        made = megatron_layout(shape, ParallelLayout(pp=2, tp=2, dp=1), vocab_multiple=128)
        for name, param in made.params.items():
            boxes = {b for held in made.held.values() for b in held.get(name, ())}
            assert mask(param.shape, boxes).all(), name


def test_key_value_heads_are_repeated_when_there_are_fewer_than_ranks():
    shape = SMALL["llama"]  # 2 kv heads of 4
    boxes = [tensor_shard("self_attn.k_proj.weight", (8, 16), shape, 4, t) for t in range(4)]
    assert [b.start[0] for b in boxes] == [0, 0, 4, 4] and {b.shape for b in boxes} == {(4, 16)}


def test_interleaved_stages():
    assert stage_of_layer(8, 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert stage_of_layer(8, 2, 2) == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ConfigError, match="7 layers"):
        stage_of_layer(7, 2)


def test_a_tied_embedding_is_on_the_first_and_the_last_stage():
    tied, untied = (megatron_layout(SMALL[n], ParallelLayout(pp=2)) for n in ("qwen2", "llama"))
    name = "model.embed_tokens.weight"
    assert all(name in tied.held[r] for r in (0, 1)) and name not in untied.held[1]
    assert "lm_head.weight" not in tied.params and tied.ties == {"lm_head.weight": name}


def test_sizes_that_do_not_divide_are_all_named():
    with pytest.raises(ConfigError) as caught:
        megatron_layout(SMALL["mixtral"], ParallelLayout(tp=3, dp=3, ep=3))
    text = str(caught.value)
    assert (
        "attention heads 4" in text
        and "intermediate size 8" in text
        and "3 " in text
        and "experts" in text
    )
