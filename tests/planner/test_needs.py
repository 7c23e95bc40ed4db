"""The fullest moment of a pool by hand: a model of round sizes, and its engine."""

from __future__ import annotations

import pytest
from helpers.planned import changed, engines, laid_out, planned

from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Device, Nodes, Task, Workload
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.needs import Member, pool_memory
from hybridflow.planner.pools import PoolPlanner

SHAPE = llama_shape(64, 6, 4, 2, 16, 128, 1000)
ACTOR = planned(
    "actor", SHAPE, trained=True, rollout_bytes=4, weight_bytes=4, compute_bytes=4, grows=True,
    optimizer_bytes=8, micro_batch_tokens=64,
)  # fmt: skip
REF = planned("ref", SHAPE, micro_batch_tokens=64)
STEP = Workload(
    (
        Task("actor", "generate", 8),
        Task("actor", "train", 8),
        Task("ref", "infer", 8),
    ),
    16,
    16,
)
PARAMS = ACTOR.size.params
TOKEN = 2 * 6 * 2 * 16 * 4
"""Bytes of a token's keys and values: 6 layers, 2 heads of 16, in float32."""


def planner_of(megabytes):
    device = Device(megabytes / 1e3, 50, 1000, 100, name="small")
    return PoolPlanner(Nodes(device, 1, 1, 10, Efficiency(usable=1.0)), STEP)


def members_of(planner, *models):
    layout = laid_out()
    return [
        Member(model, planner.option(model, layout), engines(1) if model.name == "actor" else None)
        for model in models
    ]


def test_the_parts_are_what_is_needed_at_the_fullest_moment():
    planner = planner_of(1000)
    members = members_of(planner, ACTOR, REF)
    found = pool_memory(planner, "main", members)
    assert found.needed == pytest.approx(sum(nbytes for _, nbytes in found.parts))
    assert (found.when, found.fits, found.usable) == ("while actor trains", True, 1e9)

    # Weights of 4 bytes, gradients of 4 that stay in 3D parallelism, two moments of 4.
    parts = dict(found.parts)
    assert parts["actor's weights and optimizer"] == 16 * PARAMS
    assert parts["ref's weights"] == 2 * PARAMS
    training = members[0].option.bytes.training
    assert parts["activations and logits"] == training


def test_what_an_engine_keeps_counts_while_others_work():
    """8 sequences of 32 tokens; the weights are the engine's own, as two ranks may not share."""
    keeps = changed(ACTOR, keeps_engine=True)
    planner = planner_of(1000)
    freed = pool_memory(planner, "main", members_of(planner, ACTOR))
    kept = pool_memory(planner, "main", members_of(planner, keeps))
    cache = 8 * 32 * TOKEN
    assert dict(kept.parts)["engines"] == 4 * PARAMS + cache
    assert kept.needed - freed.needed == 4 * PARAMS + cache

    # On a CPU the weights stay, whatever the setting says.
    stays = changed(ACTOR, stays=True)
    found = pool_memory(planner, "main", members_of(planner, stays))
    assert found.needed - freed.needed == 4 * PARAMS


def test_parameters_that_one_storage_holds_for_both_count_once():
    keeps = changed(ACTOR, keeps_engine=True)
    planner = planner_of(1000)
    whole = pool_memory(planner, "main", members_of(planner, keeps))
    lends = changed(keeps, lent_params=1000 * 64)
    shared = pool_memory(planner, "main", members_of(planner, lends))
    assert whole.needed - shared.needed == 4 * 1000 * 64


def test_generation_is_the_fullest_moment_of_a_model_that_learns_little():
    """The logits of 8 sequences, six times, are 192,000 bytes; a prompt pass takes less."""
    speaks = changed(ACTOR, trained=False, logit_copies=6.0, prefill_tokens=64, keeps_engine=True)
    planner = planner_of(1000)
    planner = PoolPlanner(planner.nodes, Workload(STEP.tasks[:1], 16, 16))
    found = pool_memory(planner, "main", members_of(planner, speaks))
    assert found.when == "while actor generates"
    assert dict(found.parts) == {
        "actor's weights": 4 * PARAMS,
        "the engine's weights": 4 * PARAMS,
        "its cache": 8 * 32 * TOKEN,
        "its passes": 6 * 4 * 8 * 1000,
    }
    # 64 tokens of four hidden states and three times the MLP's units: 163,840 bytes.
    prompts = changed(speaks, logit_copies=0.0)
    found = pool_memory(planner, "main", members_of(planner, prompts))
    assert dict(found.parts)["its passes"] == 64 * (4 * 64 + 3 * 128) * 4


def test_a_cache_yields_to_the_models_down_to_one_sequence():
    keeps = changed(ACTOR, keeps_engine=True)
    wide = pool_memory(planner_of(1000), "main", members_of(planner_of(1000), keeps))
    bare = wide.needed - 8 * 32 * TOKEN

    # Room for three and a half sequences
    planner = planner_of((bare + 3.5 * 32 * TOKEN) / 1e6)
    found = pool_memory(planner, "main", members_of(planner, keeps))
    assert found.fits
    assert found.needed == pytest.approx(bare + 3.5 * 32 * TOKEN)
    assert found.rooms["actor"].cache == pytest.approx(3.5 * 32 * TOKEN)
    assert found.rooms["actor"].share == pytest.approx(4 * PARAMS + 3.5 * 32 * TOKEN)
    fixed = pool_memory(planner, "main", members_of(planner, keeps), yields=False)
    assert not fixed.fits and fixed.needed == wide.needed

    # Room for less than one
    planner = planner_of((bare + 0.5 * 32 * TOKEN) / 1e6)
    found = pool_memory(planner, "main", members_of(planner, keeps))
    assert not found.fits
    assert found.needed == pytest.approx(bare + 32 * TOKEN)


def test_a_pool_of_engines_has_their_weights_and_caches_alone():
    planner = planner_of(1000)
    found = pool_memory(planner, "rollout", [Member(ACTOR, None, engines(1))])
    assert dict(found.parts) == {
        "the engine's weights": 4 * PARAMS,
        "its cache": 8 * 32 * TOKEN,
    }


def test_cuda_graphs_stay_with_the_engine_and_its_share_is_what_is_left_of_them():
    """Room for two sequences beside 0.5 MB of graphs."""
    keeps = changed(ACTOR, keeps_engine=True, graphs_gb=0.0005)
    planner = planner_of(1000)
    kept = pool_memory(planner, "main", members_of(planner, keeps))
    assert dict(kept.parts)["engines"] == 4 * PARAMS + 8 * 32 * TOKEN + 0.5e6

    bare = kept.needed - 8 * 32 * TOKEN
    planner = planner_of((bare + 2 * 32 * TOKEN) / 1e6)
    found = pool_memory(planner, "main", members_of(planner, keeps))
    room = found.rooms["actor"]
    assert found.fits and found.needed == pytest.approx(found.usable)
    assert room.cache == pytest.approx(2 * 32 * TOKEN)
    assert room.share == pytest.approx(4 * PARAMS + 2 * 32 * TOKEN)


def test_an_engine_that_says_nothing_of_its_cache_counts_what_the_sequences_need():
    silent = changed(ACTOR, grows=False, keeps_engine=True)
    planner = planner_of(1000)
    found = pool_memory(planner, "main", members_of(planner, silent), yields=False)
    assert dict(found.parts)["engines"] == 4 * PARAMS + 8 * 32 * TOKEN


def test_an_engine_that_no_step_asks_serves_validation():
    """It decodes as many sequences as it takes, 3 here."""
    asked = changed(ACTOR, max_sequences=3, keeps_engine=True)
    planner = planner_of(1000)
    planner = PoolPlanner(planner.nodes, Workload(STEP.tasks[1:2], 16, 16))
    found = pool_memory(planner, "main", members_of(planner, asked))
    assert dict(found.parts)["engines"] == 4 * PARAMS + 3 * 32 * TOKEN


def test_two_engines_that_stay_share_what_is_left():
    one = changed(ACTOR, keeps_engine=True, grows=False, trained=False)
    size = one.size.params * 4
    step = Workload((Task("one", "generate", 8), Task("two", "generate", 8)), 16, 16)
    models = [
        planned(name, SHAPE, rollout_bytes=4, weight_bytes=4, keeps_engine=True, cache_gb=1.0)
        for name in ("one", "two")
    ]
    device = Device(4 * size / 1e9 + 0.01, 50, 1000, 100, name="small")
    nodes = Nodes(device, 1, 1, 10, Efficiency(usable=1.0))
    planner = PoolPlanner(nodes, step)
    members = [Member(m, planner.option(m, laid_out()), engines(1)) for m in models]
    found = pool_memory(planner, "main", members)
    assert found.fits and found.needed == pytest.approx(found.usable)
    for room in found.rooms.values():
        assert room.cache == pytest.approx(0.005e9)
        assert room.share == pytest.approx(size + 0.005e9)
