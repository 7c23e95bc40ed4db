"""Plans carried out by the ranks of a gloo group, bit for bit, and what they cost."""

from __future__ import annotations

import pytest
import torch
from helpers import reshard_jobs as jobs

from hybridflow.core.resharding.exchange import ShardReader, same_storage
from hybridflow.core.resharding.plan import ReshardError
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, LazyShard
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.kit.layouts import engine_layout, fsdp_layout, megatron_layout, zero3_layout

QWEN = llama_shape(32, 4, 8, 8, 4, 48, 211, tied=True, qkv_bias=True)
LLAMA = llama_shape(32, 4, 8, 4, 4, 48, 209)
LARGE = llama_shape(256, 4, 8, 8, 32, 512, 4001)


def layouts(
    shape: ModelShape,
    kind: str,
    train: ParallelLayout,
    pp: int,
    tp: int,
    dtypes,
    grouping="zero-redundancy",
):
    params = shape.params(dtypes[0])
    source = {
        "3d": lambda: megatron_layout(shape, train, params, vocab_multiple=8),
        "fsdp": lambda: fsdp_layout(params, train, ties=shape.ties),
        "hsdp": lambda: fsdp_layout(params, train, 2, ties=shape.ties),
        "zero3": lambda: zero3_layout(params, train.world, shape.ties),
    }[kind]()
    return source, engine_layout(
        shape, generation_layout(train, pp, tp, grouping), shape.params(dtypes[1])
    )


F, B = torch.float32, torch.bfloat16


@pytest.mark.parametrize("shape", [QWEN, LLAMA], ids=["qwen2-tied", "llama-untied"])
@pytest.mark.parametrize("transport", ["collective", "shared_memory", "disk"])
@pytest.mark.parametrize("dtypes", [(F, F), (F, B), (B, B)], ids=["fp32", "fp32-bf16", "bf16"])
def test_every_transport_brings_the_training_weights_bit_for_bit(
    ranks, shape, transport, dtypes, tmp_path
):
    source, target = layouts(shape, "fsdp", ParallelLayout(dp=4), 1, 2, dtypes)
    for moved, planned, wrong, _ in ranks(
        jobs.move, 4, source, target, transport, 8192, str(tmp_path)
    ):
        assert wrong == []
        assert (moved.bytes_received, moved.bytes_sent) == planned
        assert moved.peak_buffer_bytes <= 8192


@pytest.mark.parametrize("shape", [QWEN, LLAMA], ids=["qwen2-tied", "llama-untied"])
@pytest.mark.parametrize("dtype", [F, B], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["3d", "hsdp", "zero3"])
def test_there_and_back_is_bit_for_bit(ranks, shape, kind, dtype, tmp_path):
    """Training -> rollout -> training: vocabularies of 211 and 209 divide by nothing."""
    train = ParallelLayout(pp=2, tp=2, dp=1) if kind == "3d" else ParallelLayout(dp=4)
    source, target = layouts(shape, kind, train, 1, 2, (dtype, dtype))
    for a, b in ((source, target), (target, source)):
        for moved, planned, wrong, _ in ranks(
            jobs.move, 4, a, b, "collective", 4096, str(tmp_path)
        ):
            assert wrong == [] and (moved.bytes_received, moved.bytes_sent) == planned


EIGHT = {
    "1-8-1 to 1-4": ("3d", ParallelLayout(1, 8, 1), 1, 4),
    "1-8-1 to 1-2": ("3d", ParallelLayout(1, 8, 1), 1, 2),
    "2-4-1 to 1-2": ("3d", ParallelLayout(2, 4, 1), 1, 2),
    "1-4-2 to 1-2": ("3d", ParallelLayout(1, 4, 2), 1, 2),
    "2-2-2 to 1-1, Megatron's order": ("3d", ParallelLayout(2, 2, 2, order="tp-cp-dp-pp"), 1, 1),
    "4-2-1 to 2-2": ("3d", ParallelLayout(4, 2, 1), 2, 2),
    "fsdp 8 to tp 2": ("fsdp", ParallelLayout(dp=8), 1, 2),
    "zero-3 8 to tp 4": ("zero3", ParallelLayout(dp=8), 1, 4),
}


@pytest.mark.parametrize("case", EIGHT.values(), ids=EIGHT.keys())
def test_eight_processes_receive_what_the_plan_says_and_the_kernel_counts_it(ranks, case, tmp_path):
    kind, train, pp, tp = case
    source, target = layouts(LARGE, kind, train, pp, tp, (F, F))
    answers = ranks(jobs.move, 8, source, target, "collective", 1 << 20, str(tmp_path))
    for moved, planned, wrong, counted in answers:
        assert wrong == [] and (moved.bytes_received, moved.bytes_sent) == planned
        assert 0 <= counted - planned[0] < 0.02 * planned[0] + 16384
    assert sum(counted for *_, counted in answers) > 10e6


def test_the_reference_engine_gathers_and_is_counted_too(ranks, tmp_path):
    train = ParallelLayout(1, 4, 1)
    source, target = layouts(QWEN, "3d", train, 1, 2, (F, F), "consecutive")
    for moved, planned, wrong, _ in ranks(
        jobs.gather, 4, source, target, [[0, 1, 2, 3]], 8192, str(tmp_path)
    ):
        assert wrong == [] and (moved.bytes_received, moved.bytes_sent) == planned


def test_a_rank_that_fails_says_so_after_the_last_round_and_the_others_end_theirs(ranks):
    source, target = layouts(LLAMA, "fsdp", ParallelLayout(dp=2), 1, 2, (F, F))
    failed, other = ranks(jobs.move_where_rank_0_cannot_read, 2, source, target, 4096)
    assert failed[0].endswith("cannot be read")
    assert failed[2] < failed[1]  # it writes nothing any more
    assert other[0] == ""
    assert other[2] == other[1] > 4


def test_shards_give_a_view_of_what_lies_within_one_of_them():
    upper, lower = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    made = []
    lazy = LazyShard((1,), lambda: made.append(1) or torch.tensor([7.0]))
    shards = ShardReader([
        ("a", Box((0, 0), (2, 3)), upper), ("a", Box((2, 0), (4, 3)), lower), ("b", Box((0,), (1,)), lazy),
    ])  # fmt: skip
    part = shards.read("a", Box((3, 1), (4, 3)))
    assert part.tolist() == [[10.0, 11.0]]
    assert same_storage(part, lower[1:, 1:])
    assert not same_storage(part, part.clone())
    assert shards.read("b", Box((0,), (1,))).tolist() == [7.0] and made == [1]


def test_what_is_not_held_in_one_piece_is_named_with_what_is():
    shards = ShardReader(
        [("a", Box((0,), (2,)), torch.zeros(2)), ("a", Box((2,), (4,)), torch.zeros(2))]
    )
    with pytest.raises(ReshardError, match=r"a \[1:3\] is not held here: \[0:2\], \[2:4\]"):
        shards.read("a", Box((1,), (3,)))
    with pytest.raises(ReshardError, match=r"b \[0:1\] is not held here: nothing of it"):
        shards.read("b", Box((0,), (1,)))
