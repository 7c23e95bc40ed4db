"""The simulators' seconds, by hand."""

from __future__ import annotations

import attrs
import pytest
from helpers.planned import changed, engines, laid_out, planned

from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Device, Nodes, PlannedModel, Task, Workload
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.memory import Memory
from hybridflow.planner.pools import PoolPlanner
from hybridflow.planner.times import Simulator

SHAPE = llama_shape(4, 2, 2, 2, 2, 8, 10)
"""2 layers of hidden 4, 2 heads of 2, intermediate 8, vocabulary 10."""
LAYER = 4 * 16 + 3 * 32 + 2 * 4  # q, k, v, o; gate, up, down; norms
HEAD = 4 * 10
ACTOR = planned("actor", SHAPE, trained=True, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, compute_bytes=4)
NOTHING = {f.name: 0.0 for f in attrs.fields(Efficiency) if f.name.endswith(("_us", "_ms", "_passes", "overlap"))}
NODES = Nodes(
    Device(memory_gb=1, tflops=1e-9, bandwidth_gbs=1e-6, link_gbs=1e-6),  # 1,000 operations, and bytes, per second
    1,
    2,
    between_gbs=1.0,
    efficiency=Efficiency(training=0.5, inference=0.25, optimizer=1.0, link=0.5, **NOTHING),
)
SIMULATOR = Simulator.of(NODES, Workload((Task("actor", "train", 6),), 3, 2))
TRUNK = 5 * (2 * 2 * LAYER + 2 * 2 * 2 * 2 * 5)  # tokens x (2 per weight; attention of 2 layers of 2 heads of 2 over 5)
LOGITS = 2 * 2 * HEAD
OPTIMIZER = 28.0  # bytes of a parameter: moments and weight read and written, its gradient read


def updated(model: PlannedModel, tp: int = 1, dp: int = 1, sequences: int = 6) -> float:
    return SIMULATOR.update(model, sequences, laid_out(1, tp, dp)) * 1000


def test_a_forward_pass_and_an_update():
    assert SIMULATOR.inference(ACTOR, 6, laid_out()) * 1000 == pytest.approx(6 * (TRUNK + LOGITS) / 0.25)
    expected = 6 * 3 * (TRUNK + LOGITS) / 0.5 + ACTOR.size.params * OPTIMIZER
    assert updated(ACTOR) == pytest.approx(expected)


def test_what_is_done_again():
    layers = updated(changed(ACTOR, recompute=True)) - updated(ACTOR)
    assert layers == pytest.approx(6 * TRUNK / 0.5)  # not the head
    pieces = updated(changed(ACTOR, logits_at_once=60)) - updated(ACTOR)  # of 6 x 2 x 10
    assert pieces == pytest.approx(6 * LOGITS / 0.5)
    alone = changed(ACTOR, logits_at_once=60, micro_batch_tokens=15)  # 3 sequences: 60 logits at once
    assert updated(alone) == pytest.approx(updated(ACTOR))


def test_adapters_have_gradients_of_their_own_weights_alone():
    adapters = changed(ACTOR, adapter_rank=1)
    assert 0 < adapters.size.trained_share < 1
    forward_and_back = 6 * ((2 + adapters.size.trained_share) * TRUNK + 2 * LOGITS) / 0.5
    expected = forward_and_back + ACTOR.size.params * adapters.size.trained_share * OPTIMIZER
    assert updated(adapters) == pytest.approx(expected)


def test_tensor_parallelism_sends_hidden_states_and_logits_where_they_are_gathered():
    whole, halves = updated(ACTOR), updated(ACTOR, tp=2)
    compute = 6 * 3 * (TRUNK + LOGITS) / 0.5 / 2 + ACTOR.size.params / 2 * OPTIMIZER
    states = 2 * 2 * 2 * (2 * 0.5) * (6 * 5 * 4 * 4) / 0.5  # layers x passes x two all-reduces, each of twice a half
    assert halves == pytest.approx(compute + states) and halves != whole
    gathered = updated(changed(ACTOR, gathers_logits=True), tp=2)
    assert gathered - halves == pytest.approx(6 * 2 * 10 * 4 * 0.5 / 0.5)


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
    assert two == pytest.approx(2 * params * 4 * 0.5 / 0.5 + params * 4 * 0.5 / 0.5 - params / 2 * OPTIMIZER)
    apart = updated(changed(gathers, replicas=2), dp=2) - updated(gathers, sequences=3)
    assert apart == pytest.approx(2 * params * 4 * 0.5 / 0.5)  # nothing is gathered, gradients are all-reduced


def test_weights_that_stay_are_gathered_once_and_zero_reduces_every_micro_batch():
    several = changed(ACTOR, sharding="fsdp", micro_batch_tokens=5)
    gathered = ACTOR.size.params * 4 * 0.5 / 0.5
    again = updated(several, dp=2) - updated(changed(several, keeps_gathered=True), dp=2)
    assert again == pytest.approx((2 * 3 - 1) * gathered)  # of three micro-batches
    zero = changed(several, sharding="zero2")
    assert updated(zero, dp=2) - updated(changed(zero, micro_batch_tokens=100), dp=2) == pytest.approx(2 * gathered)
    once = changed(several, sharding="zero1")
    assert updated(once, dp=2) == pytest.approx(updated(changed(once, micro_batch_tokens=100), dp=2))


def test_numbers_of_four_bytes_have_a_peak_of_their_own():
    device = attrs.evolve(NODES.device, fp32_tflops=NODES.device.tflops / 10)
    own = Simulator.of(attrs.evolve(NODES, device=device), SIMULATOR.workload)
    half = changed(ACTOR, compute_bytes=2)
    assert own.inference(ACTOR, 6, laid_out()) == pytest.approx(10 * own.inference(half, 6, laid_out()))
    assert SIMULATOR.inference(ACTOR, 6, laid_out()) == pytest.approx(SIMULATOR.inference(half, 6, laid_out()))


def test_the_largest_stage_counts():
    piped = changed(ACTOR, sharding="3d")
    assert piped.size.stage_params(1) == piped.size.params == 2 * LAYER + 2 * HEAD + 4
    assert piped.size.stage_params(2) == LAYER + HEAD
    one = Memory(SIMULATOR).bytes(changed(piped, trained=False), laid_out(2))
    assert one.resident == pytest.approx((LAYER + HEAD) * 4)


def test_an_offloaded_model_comes_and_goes_in_every_call():
    slow = attrs.evolve(NODES, device=attrs.evolve(NODES.device, host_gbs=1e-6))
    tasks = (Task("actor", "infer", 6, 2), Task("actor", "train", 6, 3), Task("actor", "generate", 6))
    offloaded = changed(ACTOR, offload=True)
    planner = PoolPlanner(slow, Workload(tasks, 3, 2), (ACTOR, offloaded))
    stays, moves = (planner.option(m, laid_out()) for m in (ACTOR, offloaded))
    call = 2 * ACTOR.size.params * (4 + 4 + 8) / 1000  # weights, gradients that stay, moments
    assert (moves.infer - stays.infer, moves.train - stays.train) == pytest.approx((2 * call, 3 * call))
    assert planner.transition(moves, engines(1)) - planner.transition(stays, engines(1)) == pytest.approx(call)
    assert moves.bytes.resident == 0 and moves.bytes.fetched == stays.bytes.resident
    assert moves.bytes.training == stays.bytes.training + stays.bytes.resident


def test_a_cache_of_tokens_has_them_whatever_its_cut():
    limited = changed(ACTOR, cache_tokens=10, rollout_bytes=4)
    planner = PoolPlanner(NODES, SIMULATOR.workload, (limited,))
    cache = [planner.cache(limited, engines(2, 1, tp), 0.0, 0.0) for tp in (1, 2)]
    assert cache == [10 * limited.cache_bytes, 10 * limited.cache_bytes / 2]
