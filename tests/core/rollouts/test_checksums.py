"""Sums of what was sent beside sums of what an engine holds."""

from __future__ import annotations

import pytest
import torch

from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transformers.engine import TransformersEngine
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.resharding.plan import plan_reshard
from hybridflow.core.rollouts.checksums import compare, differing, sums_sent, wanted
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


def held(plan, rank, engine, part=None):
    engine.expect(wanted(plan, rank, part))
    return {rank: engine.proof()}


def test_the_sums_of_all_senders_are_those_of_the_receiver_until_an_element_differs(engine):
    source = trained(2)
    plan = plan_reshard(source, engine.layout().renumbered(lambda rank: rank + 2))
    sent = [sums_sent(plan, rank, shards(source, rank)) for rank in range(2)]
    assert {receiver for sums in sent for _, receiver in sums} == {2}

    def found() -> dict[str, str]:
        return compare(1, [(sent[0], {}), (sent[1], {}), ({}, held(plan, 2, engine))])

    assert found() == {}
    view = engine.view(NORM, Box((3,), (4,)))
    view += 1
    assert found() == {NORM: "rank 2 has other values"}
    half = compare(1, [(sent[0], {}), ({}, held(plan, 2, engine))])
    assert list(half) == list(engine.layout().params)


def test_every_element_is_in_one_of_32_parts(engine, context):
    source = trained(1)
    plan = plan_reshard(source, engine.layout())
    name, index = "model.embed_tokens.weight", 7
    engine.view(name, Box((index, 2), (index + 1, 3))).add_(1)
    wrong = []
    for part in range(32):
        engine.expect(wanted(plan, 0, part))
        wrong.append(differing(plan, context, shards(source, 0), engine, 1, part))
    assert [found for found in wrong if found] == [{name: "rank 0 has other values"}]


def test_what_a_rank_keeps_for_itself_is_compared_too(engine, context):
    source = trained(1)
    plan = plan_reshard(source, engine.layout())
    assert plan.bytes_received == {0: 0}
    engine.expect(wanted(plan, 0))
    assert differing(plan, context, shards(source, 0), engine, 1) == {}
    engine.view(NORM, Box((0,), (1,))).mul_(2)
    assert list(differing(plan, context, shards(source, 0), engine, 1)) == [NORM]


def test_a_parameter_that_an_update_did_not_bring_is_found_whatever_part_is_compared(
    engine, context
):
    source = trained(1)
    plan = plan_reshard(source, engine.layout())
    engine.begin_update(2)
    for name, values in reference().parameters.items():
        if name != NORM:
            engine.receive(name, Box.full(values.shape), values)
    for part in (None, 5):
        engine.expect(wanted(plan, 0, part))
        found = differing(plan, context, shards(source, 0), engine, 2, part)
        assert found == {NORM: "rank 0 has that of an earlier version"}


def test_a_rank_whose_engine_cannot_answer_raises_its_error(engine, context):
    source = trained(1)
    plan = plan_reshard(source, engine.layout())
    engine.expect({"no.such": (torch.float32, (Box((0,), (1,)),))})
    with pytest.raises(HybridFlowError, match=r"no parameter 'no\.such'"):
        differing(plan, context, shards(source, 0), engine, 1)


def test_a_parameter_that_several_receivers_hold_is_named_once():
    sent = {("a", 1): 5, ("a", 2): 5, ("b", 2): 2**64 - 1}
    proofs = [{1: {"a": (7, 4)}}, {2: {"a": (7, 6), "b": (7, 2)}}]
    found = compare(7, [(sent, {}), ({("b", 2): 3}, proofs[0]), ({}, proofs[1])])
    assert found == {"a": "rank 1 has other values"}


def test_the_version_of_what_is_held_is_told():
    sent = {("a", 1): 5, ("b", 1): 3, ("c", 1): 1}
    proofs = {1: {"a": (6, 5), "b": (7, None)}}
    assert compare(7, [(sent, proofs)]) == {
        "a": "rank 1 has that of version 6",
        "c": "rank 1 has no such parameter",
    }
