"""Models that share devices: layouts and engines, what counts of them, seconds of a pool."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from helpers.planned import changed, engines, laid_out, planned

from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Device, Nodes, Task, Workload
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.pools import PoolPlanner, after, front, layouts, rollouts

SHAPE = llama_shape(64, 6, 4, 2, 16, 128, 1000)
NODES = Nodes(Device(0.01, 50, 1000, 100, name="small"), 2, 2, 10, Efficiency(usable=0.5))
"""Two nodes of two devices, each with 5 usable megabytes."""
ACTOR = planned("actor", SHAPE, trained=True, rollout_bytes=2, micro_batch_tokens=64)
REF = planned("ref", SHAPE, micro_batch_tokens=64)
STEP = Workload(
    (
        Task("actor", "generate", 8, 2),
        Task("actor", "infer", 16),
        Task("actor", "train", 4, 4),
        Task("ref", "infer", 16),
    ),
    16,
    16,
)


def sizes(found) -> set[tuple[int, ...]]:
    return {(layout.pp, layout.tp, layout.dp) for layout in found}


def test_a_row_counts_that_no_other_is_at_least_as_good_as():
    draw = np.random.default_rng(0)
    for columns in (1, 2, 3, 4):
        points = draw.integers(0, 6, (60, columns)).astype(float)
        kept = front(points)
        expected = {
            at
            for at, point in enumerate(points)
            if not any((other <= point).all() and (other < point).any() for other in points)
            and not any((other == point).all() for other in points[:at])  # of equals the first
        }
        assert set(kept.tolist()) == expected and len(kept) == len(expected)
    assert front(np.zeros((0, 3))).tolist() == []


def test_layouts_use_all_devices_with_tp_inside_a_node():
    every = {
        (1, 1, 4),
        (2, 1, 2),
        (1, 2, 2),
        (2, 2, 1),
    }  # 6 layers in 4 stages, and tp 4, there are not
    assert sizes(layouts(ACTOR, NODES, 4, 100)) == every
    assert sizes(layouts(ACTOR, NODES, 4, 2)) == every - {(1, 1, 4)}  # 2 sequences to share
    assert sizes(layouts(changed(ACTOR, axes=frozenset({"dp"})), NODES, 4, 100)) == {(1, 1, 4)}
    picky = changed(ACTOR, takes=lambda layout: layout.dp == 2)
    assert sizes(layouts(picky, NODES, 4, 100)) == {(2, 1, 2), (1, 2, 2)}


def test_tensor_parallelism_divides_the_heads():
    three = Nodes(NODES.device, 1, 3, 10)  # 4 heads do not divide by 3
    assert sizes(layouts(ACTOR, three, 3, 100)) == {(1, 1, 3), (3, 1, 1)}
    assert {(e.pp, e.tp) for e in rollouts(ACTOR, three, 3)} == {(1, 1)}


def test_engines_have_stages_in_powers_of_two_that_divide_the_layers():
    def cuts(**limits: int) -> set[tuple[int, int]]:
        return {(e.pp, e.tp) for e in rollouts(changed(ACTOR, **limits), NODES, 4)}

    assert cuts() == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert cuts(max_rollout_tp=1) == {(1, 1), (2, 1)}
    assert cuts(max_rollout_pp=1) == {(1, 1), (1, 2)}


def test_the_fastest_engine_is_taken():
    planner = PoolPlanner(NODES, STEP)
    option = planner.option(ACTOR, laid_out(1, 2, 2))
    each = [
        planner.engine(option, 4, option.bytes.resident, cut) for cut in rollouts(ACTOR, NODES, 4)
    ]
    best = planner.engine(option, 4, option.bytes.resident)
    assert len(each) == 4 and best.seconds == min(choice.seconds for choice in each)
    assert planner.engine(option, 4, NODES.memory) is None  # all of it is taken


def test_a_candidates_times_are_those_of_its_models_choices():
    planner = PoolPlanner(NODES, STEP)
    found = planner.candidates((ACTOR, REF), 4)
    assert found
    for candidate in found:
        entry = planner.entry((ACTOR, REF), candidate)
        assert [c.option.model.name for c in entry.choices] == ["actor", "ref"]
        for stage, verb in enumerate(("generate", "infer", "train")):
            own = sum(choice.time(verb) for choice in entry.choices)
            assert candidate.times[stage] == pytest.approx(own), verb
    for one, other in itertools.permutations(found, 2):
        assert any(mine < theirs for mine, theirs in zip(one.times, other.times, strict=True))


def test_a_pool_has_no_candidate_without_the_memory():
    tight = attrs.evolve(NODES, device=attrs.evolve(NODES.device, memory_gb=1e-4))
    assert PoolPlanner(tight, STEP).candidates((ACTOR, REF), 4) == []


def test_columns_go_to_pools_in_which_nothing_generates():
    planner = PoolPlanner(NODES, STEP)
    rows = 8 * 2 * (16 + 16) * 64  # sequences, tokens, bytes of one
    assert planner.moved((REF,)) == pytest.approx(rows / (10e9 * 0.8))
    assert planner.moved((ACTOR, REF)) == 0.0
    assert PoolPlanner(NODES, Workload(STEP.tasks[1:], 16, 16)).moved((REF,)) == 0.0


def test_what_is_moved_comes_before_the_first_stage_that_there_is():
    assert after(1.0, 2.0, 3.0) == (3.0, 3.0)
    assert after(1.0, 0.0, 3.0) == (0.0, 4.0)
    assert after(1.0, 0.0, 0.0) == (0.0, 0.0)


def test_an_engine_that_stays_gets_what_training_leaves():
    """5 MB are usable; 1 MB rest, 0.5 MB are the engine's weights, and training takes 2 MB more."""
    keeps = changed(ACTOR, keeps_engine=True)
    planner = PoolPlanner(NODES, STEP)
    alone = engines(4)
    assert planner.cache(ACTOR, alone, 1e6, 0.5e6, 2e6) == pytest.approx(3.5e6)
    assert planner.cache(keeps, alone, 1e6, 0.5e6, 2e6) == pytest.approx(1.5e6)
    limited = changed(keeps, cache_gb=0.001)
    assert planner.cache(limited, alone, 1e6, 0.5e6, 2e6) == pytest.approx(1e6)


def test_a_cache_that_grows_takes_what_the_sequences_need():
    """8 sequences on 4 engines of one device: 2 each, of 32 + 4 tokens, in blocks of 16: 48."""
    grows = changed(ACTOR, grows=True, block_tokens=16, spare_tokens=4)
    planner = PoolPlanner(NODES, STEP)
    option = planner.option(grows, laid_out(dp=4))
    choice = planner.engine(option, 4, 0.0, engines(4))
    assert choice.cache_bytes == 2 * 48 * grows.cache_bytes


def test_an_offloaded_model_comes_and_goes_in_every_call():
    slow = attrs.evolve(
        NODES, device=attrs.evolve(NODES.device, host_gbs=1e-6)
    )  # 1,000 bytes per second
    offloaded = changed(ACTOR, offload=True)
    planner = PoolPlanner(slow, STEP)
    stays, moves = (planner.option(model, laid_out()) for model in (ACTOR, offloaded))
    call = (
        2 * ACTOR.size.params * (2 + 4 + 12) / 1000
    )  # weights, gradients that stay, moments and masters
    assert (moves.infer - stays.infer, moves.train - stays.train) == pytest.approx(
        (1 * call, 4 * call)
    )
    assert planner.transition(moves, engines(1)) - planner.transition(
        stays, engines(1)
    ) == pytest.approx(call)
    assert moves.bytes.resident == 0 and moves.bytes.fetched == stays.bytes.resident
    assert moves.bytes.training == stays.bytes.training + stays.bytes.resident


def test_a_cache_of_tokens_has_them_whatever_its_cut():
    limited = changed(ACTOR, cache_tokens=10)
    planner = PoolPlanner(NODES, STEP)
    cache = [planner.cache(limited, engines(2, 1, tp), 0.0, 0.0) for tp in (1, 2)]
    assert cache == [10 * limited.cache_bytes, 10 * limited.cache_bytes / 2]


def test_the_least_of_an_engines_limits_counts_for_its_cache():
    whole = ACTOR.size.params * 2.0
    left = 5e6 - 1e6 - 2e5

    def cache(**limits) -> float:
        model = changed(ACTOR, **limits)
        return PoolPlanner(NODES, STEP).cache(model, engines(2), 1e6, 2e5)

    assert cache() == pytest.approx(left)
    assert cache(cache_gb=1e-3) == pytest.approx(1e6)
    assert cache(memory_share=0.3) == pytest.approx(0.3 * 1e7 - whole)
    assert cache(memory_share=0.3, cache_gb=1.0) == pytest.approx(0.3 * 1e7 - whole)
