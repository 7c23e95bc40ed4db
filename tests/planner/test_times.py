"""The simulators' seconds, by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from helpers.planned import changed, engines, laid_out, planned

from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Device, Nodes, PlannedModel, Task, Workload
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.times import Simulator

SHAPE = llama_shape(4, 2, 2, 2, 2, 8, 10)
"""2 layers of hidden 4, 2 heads of 2, intermediate 8, vocabulary 10."""
LAYER = 4 * 16 + 3 * 32 + 2 * 4  # q, k, v, o; gate, up, down; norms
HEAD = 4 * 10
ACTOR = planned(
    "actor",
    SHAPE,
    trained=True,
    weight_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,
    compute_bytes=4,
)
NOTHING = {
    f.name: 0.0
    for f in attrs.fields(Efficiency)
    if f.name.endswith(("_us", "_ms", "_passes", "overlap"))
}
NODES = Nodes(
    Device(
        memory_gb=1, tflops=1e-9, bandwidth_gbs=1e-6, link_gbs=1e-6
    ),  # 1,000 operations, and bytes, per second
    1,
    2,
    between_gbs=1.0,
    efficiency=Efficiency(training=0.5, inference=0.25, optimizer=1.0, link=0.5, **NOTHING),
)
SIMULATOR = Simulator.of(NODES, Workload((Task("actor", "train", 6),), 3, 2))
TRUNK = 5 * (
    2 * 2 * LAYER + 2 * 2 * 2 * 2 * 5
)  # tokens x (2 per weight; attention of 2 layers of 2 heads of 2 over 5)
LOGITS = 2 * 2 * HEAD
OPTIMIZER = 28.0  # bytes of a parameter: moments and weight read and written, its gradient read


def updated(model: PlannedModel, tp: int = 1, dp: int = 1, sequences: int = 6) -> float:
    return SIMULATOR.update(model, sequences, laid_out(1, tp, dp)) * 1000


def test_a_forward_pass_and_an_update():
    assert SIMULATOR.inference(ACTOR, 6, laid_out()) * 1000 == pytest.approx(
        6 * (TRUNK + LOGITS) / 0.25
    )
    expected = 6 * 3 * (TRUNK + LOGITS) / 0.5 + ACTOR.size.params * OPTIMIZER
    assert updated(ACTOR) == pytest.approx(expected)


def test_what_is_done_again():
    layers = updated(changed(ACTOR, recompute=True)) - updated(ACTOR)
    assert layers == pytest.approx(6 * TRUNK / 0.5)  # not the head
    pieces = updated(changed(ACTOR, logits_at_once=60)) - updated(ACTOR)  # of 6 x 2 x 10
    assert pieces == pytest.approx(6 * LOGITS / 0.5)
    alone = changed(
        ACTOR, logits_at_once=60, micro_batch_tokens=15
    )  # 3 sequences: 60 logits at once
    assert updated(alone) == pytest.approx(updated(ACTOR))


def test_adapters_have_gradients_of_their_own_weights_alone():
    adapters = changed(ACTOR, adapter_rank=1)
    assert 0 < adapters.size.trained_share < 1
    forward_and_back = 6 * ((2 + adapters.size.trained_share) * TRUNK + 2 * LOGITS) / 0.5
    expected = forward_and_back + ACTOR.size.params * adapters.size.trained_share * OPTIMIZER
    assert updated(adapters) == pytest.approx(expected)


def test_tensor_parallelism_sends_hidden_states():
    whole, halves = updated(ACTOR), updated(ACTOR, tp=2)
    compute = 6 * 3 * (TRUNK + LOGITS) / 0.5 / 2 + ACTOR.size.params / 2 * OPTIMIZER
    states = (
        2 * 2 * 2 * (2 * 0.5) * (6 * 5 * 4 * 4) / 0.5
    )  # layers x passes x two all-reduces, each of twice a half
    assert halves == pytest.approx(compute + states) and halves != whole


def test_data_parallelism_reduces_gradients_of_what_is_trained():
    reduced = updated(ACTOR, dp=2) - updated(ACTOR, sequences=3)
    assert reduced == pytest.approx(2 * 0.5 * ACTOR.size.params * 4 / 0.5)
    adapters = changed(ACTOR, adapter_rank=1)
    less = updated(adapters, dp=2) - updated(adapters, sequences=3)
    assert less == pytest.approx(reduced * adapters.size.trained_share)


def test_replicas_gather_and_reduce_among_few():
    gathers = changed(ACTOR, sharding="fsdp")
    two = updated(gathers, dp=2) - updated(gathers, sequences=3)
    params = ACTOR.size.params
    assert two == pytest.approx(
        2 * params * 4 * 0.5 / 0.5 + params * 4 * 0.5 / 0.5 - params / 2 * OPTIMIZER
    )
    apart = updated(changed(gathers, replicas=2), dp=2) - updated(gathers, sequences=3)
    assert apart == pytest.approx(
        2 * params * 4 * 0.5 / 0.5
    )  # nothing is gathered, gradients are all-reduced


def test_weights_that_stay_are_gathered_once_and_zero_reduces_every_micro_batch():
    several = changed(ACTOR, sharding="fsdp", micro_batch_tokens=5)
    gathered = ACTOR.size.params * 4 * 0.5 / 0.5
    again = updated(several, dp=2) - updated(changed(several, keeps_gathered=True), dp=2)
    assert again == pytest.approx((2 * 3 - 1) * gathered)  # of three micro-batches
    zero = changed(several, sharding="zero2")
    assert updated(zero, dp=2) - updated(
        changed(zero, micro_batch_tokens=100), dp=2
    ) == pytest.approx(2 * gathered)
    once = changed(several, sharding="zero1")
    assert updated(once, dp=2) == pytest.approx(
        updated(changed(once, micro_batch_tokens=100), dp=2)
    )


def test_numbers_of_four_bytes_have_a_peak_of_their_own():
    device = attrs.evolve(NODES.device, fp32_tflops=NODES.device.tflops / 10)
    own = Simulator.of(attrs.evolve(NODES, device=device), SIMULATOR.workload)
    half = changed(ACTOR, compute_bytes=2)
    assert own.inference(ACTOR, 6, laid_out()) == pytest.approx(
        10 * own.inference(half, 6, laid_out())
    )
    assert SIMULATOR.inference(ACTOR, 6, laid_out()) == pytest.approx(
        SIMULATOR.inference(half, 6, laid_out())
    )


GENERATES = changed(ACTOR, rollout_bytes=4, max_sequences=2)
WEIGHTS = GENERATES.size.params * 4
PROMPT = 3 * (2 * 2 * LAYER + 2 * 2 * 2 * 2 * 3)  # operations of the layers for 3 tokens
CACHED = 2 * 2 * 2 * 2 * 4  # of a token: keys and values of 2 layers of 2 heads of 2


def test_engines_read_prompts_and_decode_as_many_sequences_as_fit():
    """6 sequences on 2 engines of one device: 3 for each, 2 at once, of 5 tokens."""
    steps = 3 / 2 * 2  # rounds of 2 tokens
    decoding = 2 * 2 * (2 * LAYER + HEAD) / 250  # of 2 sequences: more than what they read takes
    seconds = 3 * PROMPT / 250 + steps * decoding
    assert SIMULATOR.generation(GENERATES, 6, engines(2), 1e9) == pytest.approx(seconds)
    one = 3 * PROMPT / 250 + 3 * 2 * (2 * (2 * LAYER + HEAD) / 250)
    free = [5 * CACHED - 1, 5 * CACHED, 10 * CACHED]
    found = SIMULATOR.generation(GENERATES, 6, engines(2), np.array(free))
    assert found.tolist() == pytest.approx([float("inf"), one, seconds])


def test_decoding_takes_as_long_as_reading_the_weights_and_the_cache_where_memory_is_slow():
    slow = attrs.evolve(NODES, device=attrs.evolve(NODES.device, bandwidth_gbs=1e-8))
    found = Simulator.of(slow, SIMULATOR.workload).generation(GENERATES, 6, engines(2), 1e9)
    read = WEIGHTS + 2 * (3 + 1) * CACHED  # 2 sequences that are half-way on average
    assert found == pytest.approx(3 * PROMPT / 250 + 3 / 2 * 2 * read / (10 * 0.8))


def test_engines_of_two_devices_reduce_hidden_states():
    prompts = 6 * PROMPT / 500 + 2 * 2 * (6 * 3 * 4 * 4) / 500  # layers x two all-reduces
    decoding = 2 * 2 * (2 * LAYER + HEAD) / 500 + 2 * 2 * (2 * 4 * 4) / 500
    found = SIMULATOR.generation(GENERATES, 6, engines(2, 1, 2), 1e9)
    assert found == pytest.approx(prompts + 6 / 2 * 2 * decoding)


@pytest.mark.parametrize(
    ("trained", "generates"),
    [
        ((1, 1), (1, 1)),
        ((1, 2), (1, 1)),
        ((2, 4), (1, 2)),
        ((4, 2), (2, 2)),
        ((2, 2), (2, 2)),
        ((1, 8), (1, 4)),
    ],
)
def test_a_rank_receives_what_the_papers_table_says(trained, generates):
    """(t p - t_g p_g) / (t_g p_g t p) M: arXiv:2409.19256, table 2."""
    (p, t), (p_g, t_g) = trained, generates
    found = SIMULATOR.received(GENERATES, laid_out(p, t), engines(p * t, p_g, t_g))
    assert found == pytest.approx(WEIGHTS * (t * p - t_g * p_g) / (t_g * p_g * t * p))


def test_weights_that_are_spread_over_dp_are_kept_as_far_as_they_reach():
    spread = changed(GENERATES, sharding="fsdp")
    kept = [SIMULATOR.kept(spread, laid_out(dp=4), engines(4, 1, tp)) for tp in (1, 2, 4)]
    assert kept == [WEIGHTS / 4] * 3
    assert SIMULATOR.kept(spread, laid_out(dp=2), engines(4, 1, 4)) == 0.0
    assert (
        SIMULATOR.kept(GENERATES, laid_out(1, 2), engines(6, 1, 3)) == 0.0
    )  # no part of one is in one of the other


def test_weights_go_over_the_links_or_out_of_the_node():
    inside = SIMULATOR.transition(GENERATES, laid_out(1, 2), engines(2))
    assert inside == pytest.approx(WEIGHTS / 2 / 500)
    wide = Simulator.of(attrs.evolve(NODES, count=2, between_gbs=1e-6), SIMULATOR.workload)
    outside = wide.transition(GENERATES, laid_out(2, 2), engines(4))
    assert outside == pytest.approx(
        WEIGHTS * 3 / 4 * 2 / (1000 * 0.8)
    )  # two ranks of a node receive at once
    takes = attrs.evolve(NODES, efficiency=attrs.evolve(NODES.efficiency, sync_ms=250.0))
    assert (
        Simulator.of(takes, SIMULATOR.workload).transition(GENERATES, laid_out(), engines(1))
        == 0.25
    )
