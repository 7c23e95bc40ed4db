"""Sums of what was sent beside sums of what an engine holds."""

from __future__ import annotations

import pytest
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.checksums import compare, differing, sums_held, sums_sent
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.testing import give_weights, one_rank, reference

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request, context):
    """With the weights of a Hugging Face model, as rank 0."""
    engine = TransformersEngine(
        reference().spec, TransformersEngineConfig(dtype=request.param), context
    )
    engine.start()
    give_weights(engine, reference().parameters, 1)
    return engine


def trained(ranks: int) -> WeightLayout:
    """The model in float32, cut along its first dimension over so many ranks."""
    parameters = reference().parameters
    held = {
        rank: {name: (rows(tensor, rank, ranks),) for name, tensor in parameters.items()}
        for rank in range(ranks)
    }
    return WeightLayout(
        {name: Param(tuple(t.shape), t.dtype) for name, t in parameters.items()}, held
    )


def rows(tensor: torch.Tensor, rank: int, ranks: int) -> Box:
    ends = [len(tensor) * at // ranks for at in (rank, rank + 1)]
    return Box.part(tuple(tensor.shape), 0, *ends)


def shards(layout: WeightLayout, rank: int) -> ShardReader:
    held = layout.held[rank].items()
    return ShardReader(
        (name, box, reference().parameters[name][box.slices()]) for name, (box,) in held
    )


def test_the_sums_of_all_senders_are_those_of_the_receiver_until_an_element_differs(engine):
    source = trained(2)
    plan = plan_reshard(source, engine.layout().renumbered(lambda rank: rank + 2))
    sent = [sums_sent(plan, rank, shards(source, rank)) for rank in range(2)]
    assert {receiver for sums in sent for _, receiver in sums} == {2}

    def found() -> list[str]:
        return compare([(sent[0], {}), (sent[1], {}), ({}, sums_held(plan, 2, engine))])

    assert found() == []
    view = engine.view(NORM, Box((3,), (4,)))
    view += 1
    assert found() == [NORM]
    assert compare([(sent[0], {}), ({}, sums_held(plan, 2, engine))]) == list(
        engine.layout().params
    )


def test_what_a_rank_keeps_for_itself_is_compared_too(engine, context):
    source = trained(1)
    plan = plan_reshard(source, engine.layout())
    assert plan.bytes_received == {0: 0}
    assert differing(plan, context, shards(source, 0), engine) == []
    engine.view(NORM, Box((0,), (1,))).mul_(2)
    assert differing(plan, context, shards(source, 0), engine) == [NORM]


def test_a_parameter_that_several_receivers_hold_is_named_once():
    sent = {("a", 1): 5, ("a", 2): 5, ("b", 2): 2**64 - 1}
    assert compare(
        [(sent, {}), ({("b", 2): 3}, {}), ({}, {("a", 1): 4}), ({}, {("a", 2): 6, ("b", 2): 2})]
    ) == ["a"]


def test_what_nobody_sent_is_named_though_its_sum_is_zero():
    assert compare([({("a", 1): 0}, {("a", 1): 0, ("b", 1): 0})]) == ["b"]
