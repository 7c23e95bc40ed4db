"""The engines that others have, and what no plan can go below, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.brute import check_plan, layout, lower_bound, mask, whole

from hybridflow.cli.gather import gather_plan
from hybridflow.core.resharding.plan import ReshardError, plan_reshard
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.kit.layouts import engine_layout, fsdp_layout, megatron_layout

SHAPE = llama_shape(16, 4, 4, 2, 4, 24, 50)
TRAINED = ParallelLayout(pp=2, tp=2, dp=2)
SOURCES = {
    "a pipeline of two": megatron_layout(SHAPE, TRAINED, vocab_multiple=1),
    "spread over dp": fsdp_layout(SHAPE.params(), ParallelLayout(dp=8)),
}
TARGET = engine_layout(SHAPE, generation_layout(TRAINED, 1, 2))


def lacking(source: WeightLayout, target: WeightLayout, rank: int) -> int:
    """Bytes that a rank wants and has not, counted element by element."""
    total = 0
    for name, boxes in target.held[rank].items():
        param = target.params[name]
        wanted = mask(param.shape, boxes) > 0
        held = mask(param.shape, source.held[rank].get(name, ())) > 0
        total += int((wanted & ~held).sum()) * param.dtype.itemsize
    return total


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_every_rank_of_a_group_gets_the_whole_model_once(source):
    total = sum(param.nbytes for param in source.params.values())
    plan = gather_plan(source, TARGET, [list(range(8))])
    check_plan(plan)
    for rank in range(8):
        assert plan.bytes_received[rank] == total - source.nbytes(rank)


def test_groups_gather_by_themselves():
    source = SOURCES["a pipeline of two"]
    groups = TRAINED.groups("tp-cp-pp")  # replicas
    plan = gather_plan(source, TARGET, groups)
    check_plan(plan)
    where = {rank: at for at, group in enumerate(groups) for rank in group}
    pairs = {pair for flow in plan.flows for pair in flow.pairs()}
    assert pairs and all(where[sender] == where[receiver] for sender, receiver in pairs)


def test_what_stands_beside_the_generation_shard_is_redundant():
    source = SOURCES["spread over dp"]
    plan = gather_plan(source, TARGET, [list(range(8))])
    for rank in range(8):
        outside = 0
        for name, param in source.params.items():
            held = mask(param.shape, source.held[rank].get(name, ())) > 0
            generates = mask(param.shape, TARGET.held[rank].get(name, ())) > 0
            outside += int((held & ~generates).sum()) * param.dtype.itemsize
        assert plan.bytes_redundant[rank] == outside
    assert max(plan.bytes_redundant.values()) > 0


def test_a_group_that_does_not_hold_everything_is_refused():
    with pytest.raises(ReshardError):
        gather_plan(SOURCES["spread over dp"], TARGET, [[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_the_lower_bound_is_what_a_rank_lacks(source):
    bounds = [lower_bound(source, TARGET, rank) for rank in range(8)]
    assert bounds == [lacking(source, TARGET, rank) for rank in range(8)]
    assert bounds == list(plan_reshard(source, TARGET).bytes_received.values())
    everything = gather_plan(source, TARGET, [list(range(8))])
    assert all(np.less_equal(bounds, list(everything.bytes_received.values())))


def test_the_lower_bound_travels_in_the_narrower_dtype_and_under_the_tied_name():
    shapes = {"embedding": (4, 3)}
    source = layout(shapes, {0: {"embedding": (Box((0, 0), (1, 3)),)}}, ties={"head": "embedding"})
    target = layout({"head": (4, 3)}, {0: {"head": whole((4, 3))}}, dtype=torch.bfloat16)
    assert lower_bound(source, target, 0) == (12 - 3) * 2
