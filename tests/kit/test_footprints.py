"""Bytes held and moved, by the papers' tables and by hand."""

from __future__ import annotations

import attrs
import pytest
import torch

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.contracts.footprint import CollectiveCost, Phase
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.footprints import FullyShardedLayers, Sharding, Spread, ThreeDSharding, Zero
from hybridflow.kit.huggingface.shapes import llama_shape

LAYER, EMBEDDING = 144, 40
"""Parameters of a layer (64 attention, 72 MLP, 8 norms), of the embedding, and of the head."""
WHOLE = 2 * LAYER + 2 * EMBEDDING + 4
SMALL = ModelSize(llama_shape(4, 2, 2, 2, 2, 6, 10))
ONE, DP4 = ParallelLayout(), ParallelLayout(dp=4)


def made(way: Sharding, layout=ONE, trained=True, micro_batches=1, size=SMALL):
    return way.footprint(size, layout, trained, micro_batches)


BILLIONS = 7_500_000_000
MATRIX = {"all": (BILLIONS - 2,)}
ZERO_MODEL = ModelSize(ModelShape(1, 1, 1, 1, 1, 1, 1, layer=MATRIX, ties={"head": "embedding"}))


@pytest.mark.parametrize(
    ("way", "gigabytes"),
    [(ThreeDSharding, 120.0), ({"stage": 1}, 31.4), ({"stage": 2}, 16.6), ({"stage": 3}, 1.9)],
    ids=str,
)
def test_at_rest_are_the_bytes_of_figure_1_of_zero(way, gigabytes):
    """arXiv:1910.02054: 7.5 billion parameters on 64 devices, 2 + 2 + 12 bytes each."""
    figures = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12}
    figures["keeps_gradients"] = True
    sharding = Zero(**way, **figures) if isinstance(way, dict) else way(**figures)
    assert ZERO_MODEL.params == BILLIONS
    found = made(sharding, ParallelLayout(dp=64), size=ZERO_MODEL)
    assert found.resident / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_zero_3_moves_the_parameters_three_times():
    """arXiv:1910.02054, section 7.2.2: gathered in both passes, and the gradients scattered."""
    found = made(Zero(stage=3), DP4, micro_batches=2)
    gather = CollectiveCost("all_gather", 2.0 * WHOLE, 4, 1)
    assert found.forward == found.backward == (gather,)
    scatter, between = found.update
    assert scatter == CollectiveCost("reduce_scatter", 4.0 * WHOLE, 4, 1, times=2)
    assert between.ranks == 1
    assert found.weight_ranks == 4 and found.spread_over_dp


def test_stages_1_and_2_gather_the_weights_after_the_step():
    for stage, times in ((1, 1), (2, 3)):
        found = made(Zero(stage=stage), DP4, micro_batches=3)
        scatter, gather, _ = found.update
        assert scatter == CollectiveCost("reduce_scatter", 4.0 * WHOLE, 4, 1, times=times)
        assert gather == CollectiveCost("all_gather", 2.0 * WHOLE, 4, 1)
        assert found.forward == () and not found.spread_over_dp


def test_the_optimizer_of_a_rank_reads_and_writes_its_own_part():
    """Moments and a master (12 bytes) and weights (2) both ways, gradients (4) once: 32 bytes."""
    assert made(ThreeDSharding()).step_traffic == 32 * WHOLE
    for spread in (Zero(stage=1), FullyShardedLayers()):
        assert made(spread, DP4).step_traffic == 8 * WHOLE


def test_tensor_and_pipeline_ranks_hold_their_part_of_the_largest_stage():
    layout = ParallelLayout(pp=2, tp=2, dp=3)
    mine = (LAYER + EMBEDDING) / 2
    plain, spread = (
        made(ThreeDSharding(), layout),
        made(ThreeDSharding(distributed_optimizer=True), layout),
    )
    assert plain.resident == mine * (2 + 4 + 12)
    assert spread.resident == mine * (2 + 4 + 12 / 3)
    assert plain.weight_ranks == spread.weight_ranks == 4
    assert plain.update == (CollectiveCost("all_reduce", 4 * mine, 3, 4),)
    assert [c.kind for c in spread.update[:2]] == ["reduce_scatter", "all_gather"]


def test_a_frozen_model_has_weights_alone():
    for way in (ThreeDSharding(), Zero(stage=1), FullyShardedLayers(), Zero(stage=3)):
        found = made(way, trained=False)
        assert found.resident == 2 * WHOLE
        assert found.training == () and found.update == () and found.step_traffic == 0.0


def test_replicas_spread_inside_their_group_and_add_up_between_groups():
    found = made(FullyShardedLayers(replicas=2, optimizer_bytes=8), ParallelLayout(tp=2, dp=8))
    assert found.resident == WHOLE / 2 * (2 + 8) / 4
    assert found.forward == (CollectiveCost("all_gather", 2.0 * WHOLE / 2, 4, 2),)
    scatter, between = found.update
    assert scatter == CollectiveCost("reduce_scatter", 4.0 * WHOLE / 2, 4, 2)
    assert between == CollectiveCost("all_reduce", 4.0 * WHOLE / 2 / 4, 2, 8)  # 2 * 4 ranks apart


def test_adapters_alone_are_trained():
    """Rank 3 on 4 x 4 and 6 x 4 matrices of two layers: B and A have 3 * (rows + columns)."""
    adapters = 2 * 3 * (4 * (4 + 4) + 3 * (6 + 4))
    size = ModelSize(SMALL.shape, adapter_rank=3)
    way = ThreeDSharding(adapter_rank=3)
    assert made(way, size=size).resident == pytest.approx(2 * WHOLE + 16 * adapters)
    assert way.execution(True).adapter_rank == 3


def test_whole_weights_keep_gradients_from_the_first_backward_pass_to_their_reduction():
    gradients = 4.0 * WHOLE
    once = made(Zero(stage=1), DP4, micro_batches=1)
    assert once.training == (Phase(0.0, "forward"), Phase(0.0, "backward"), Phase(gradients / 4))
    twice = made(Zero(stage=1), DP4, micro_batches=2)
    assert twice.training[:2] == (Phase(gradients, "forward"), Phase(gradients, "backward"))
    staying = made(Zero(stage=1, keeps_gradients=True), DP4, micro_batches=2)
    assert staying.training == (Phase(0.0, "forward"), Phase(0.0, "backward"), Phase(0.0))
    assert staying.resident - twice.resident == gradients


def test_a_buffer_is_never_larger_than_the_model_and_stays_where_gradients_stay():
    for elements, bytes_of_it in ((100, 200.0), (10**9, 2.0 * WHOLE)):
        kept = Zero(stage=3, keeps_gradients=True, bucket_elements=elements)
        without = Zero(stage=3, keeps_gradients=True)
        assert made(kept).resident - made(without).resident == bytes_of_it
        assert made(kept).reading == 2 * max(bytes_of_it, 2.0 * LAYER)


def test_fsdp_gathers_a_layer_beside_the_next_or_all_of_them_at_once():
    whole, layer = 2.0 * WHOLE, 2.0 * LAYER
    by_layer = made(FullyShardedLayers(), DP4)
    others = whole - 2 * layer
    assert by_layer.reading == others + layer  # the one at work ...
    assert by_layer.ahead == layer  # ... and the next, which is not there while the head works
    alone = made(FullyShardedLayers(), ONE)
    assert alone.reading == others + layer  # nothing is fetched: a copy of the one at work
    assert alone.ahead == 0.0
    kept = made(FullyShardedLayers(keeps_gathered=True), DP4)
    assert kept.reading == whole and kept.ahead == layer
    assert kept.call == by_layer.forward and kept.forward == kept.backward == ()
    at_once = made(FullyShardedLayers(whole_below=LAYER + 1), DP4)
    assert at_once.reading == 2 * whole and at_once.call == kept.call
    assert made(FullyShardedLayers(whole_below=LAYER), DP4).call == ()


def test_fsdp_has_whole_gradients_of_a_layer_at_a_time():
    """Bytes: a layer 288 gathered, 288 its gradients, 576 in their reduction; 84 parameters outside the layers are 168
    gathered, 504 in gradients and reduction; the head's gradient is 80, that of a 4 x 6 matrix 48."""
    shards = WHOLE  # 4 bytes of each parameter, on 4 ranks
    once = made(FullyShardedLayers(), DP4)
    assert once.training == (
        Phase(168 + 288, "forward"),
        Phase(168 + 288, "head"),
        Phase(168 + 576 + 80 + 48, "layer"),
        Phase(168 + 576 + 80 + 288 + 576, "rest"),
        Phase(168 + 576 + 80 + 48 + 576, "next"),
        Phase(shards + 504),
        Phase(2 * 168 + 2 * 288),  # a forward pass begins
    )
    several = made(FullyShardedLayers(), DP4, micro_batches=3)
    for at in (0, 1, 2, 3, 4, 6):
        before, after = once.training[at], several.training[at]
        assert after == Phase(before.nbytes + shards, before.activations)
    assert several.training[5] == Phase(shards + 168 + 504)  # the root stays gathered


def test_gradients_of_a_table_that_is_the_head_too_meet():
    tied = ModelSize(llama_shape(4, 2, 2, 2, 2, 6, 10, tied=True))
    found = made(FullyShardedLayers(), DP4, size=tied)
    shards = WHOLE - EMBEDDING
    assert found.training[-2] == Phase(shards + 2 * 44 + 576 + 3 * 80)  # both, and their sum


def test_tensor_parallel_ranks_make_the_gradient_of_the_whole_embedding():
    """84 / 2 parameters outside the layers are gathered; a rank's half of the head's gradient is 40 bytes, a table 80,
    a layer's reduction 288."""
    found = made(FullyShardedLayers(), ParallelLayout(dp=4, tp=2))
    assert found.training[-2] == Phase(WHOLE / 2 + 84 + 288 + 40 + 80 + 40)


def test_fsdp_reduces_gradients_in_every_micro_batch():
    """All at once: those of the whole model are whole just then."""
    whole = 2.0 * WHOLE
    scatter, _ = made(FullyShardedLayers(), DP4, micro_batches=3).update
    assert scatter == CollectiveCost("reduce_scatter", 4.0 * WHOLE, 4, 1, times=3)
    way = FullyShardedLayers(whole_below=LAYER + 1)
    once = made(way, DP4)
    assert once.training == (
        Phase(2 * whole, "forward"),
        Phase(whole, "backward"),
        Phase(2 * whole + 2 * 80),
        Phase(3 * whole),
        Phase(4.0 * WHOLE * 2.25),  # gloo's copy, and a quarter of it
    )

    # Between the first and the last, the shards of before are there, and the weights stay.
    shards = 4.0 * WHOLE / 4
    assert made(way, DP4, micro_batches=3).training == (
        Phase(shards + 2 * whole, "forward"),
        Phase(shards + whole, "backward"),
        Phase(shards + 2 * whole + 2 * 80),
        Phase(whole + shards + 3 * whole),
        Phase(whole + shards + 4.0 * WHOLE * 2.25),
    )
    assert made(way, DP4, micro_batches=2).training[-1] == Phase(whole + 4.0 * WHOLE * 2.25)

    # One rank copies its gradients into a message, and out of it.
    alone = made(way, ParallelLayout()).training
    assert alone[-2:] == (Phase(whole + 4.0 * WHOLE), Phase(2 * 4.0 * WHOLE))


def test_a_rank_by_itself_may_gather_and_reduce_nothing():
    """Weights and two moments of 4 bytes; gradients of 4; an embedding and a head of 40 parameters."""
    way = FullyShardedLayers(weight_bytes=4, optimizer_bytes=8, compute_bytes=4, plain_alone=True)
    alone = made(way, ParallelLayout())
    assert alone.resident == 12.0 * WHOLE
    assert (alone.reading, alone.ahead, alone.begun) == (0.0, 0.0, 0.0)
    assert alone.training == (
        Phase(0.0, "forward"),
        Phase(0.0, "head"),
        Phase(160.0, "layer"),
        Phase(4.0 * WHOLE + 160 + 160),
    )
    several = made(way, ParallelLayout(), micro_batches=2).training
    assert several[0] == Phase(4.0 * WHOLE, "forward")
    assert several[2] == Phase(4.0 * WHOLE + 160, "layer")
    assert made(way, DP4) == made(attrs.evolve(way, plain_alone=False), DP4)


def test_what_is_on_the_host_takes_nothing_of_the_device():
    way = FullyShardedLayers(on_host=True)
    assert made(way).resident == 0.0 and way.execution(False).from_host
    offloaded = Zero(optimizer_bytes=0)  # its optimizer is on the host
    assert offloaded.execution(True).from_host and not offloaded.execution(False).from_host


def test_settings_say_what_their_way_does():
    way = Zero(stage=2, weight_bytes=4, recompute=True, moves=False, shares_weights=True)
    settings = Spread(way)
    assert settings.footprint(SMALL, DP4, True, 2) == way.footprint(SMALL, DP4, True, 2)
    execution = settings.execution(True)
    assert (execution.weight_bytes, execution.recompute, execution.offloads) == (4, True, False)
    assert execution.shares_weights and settings.takes(SMALL.shape, ParallelLayout(pp=2, tp=3))


def test_the_example_model_is_one_that_transformers_builds():
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = Spread().example_config(hidden=64, layers=3, vocab=50, heads=4, kv_heads=2)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 64, 128)
    shape = Spread().model_shape(fields)
    assert ModelSize(shape).params == sum(p.numel() for p in model.parameters())


def test_bytes_cannot_be_negative():
    with pytest.raises(ValueError, match="optimizer_bytes: must be 0 or more, got -1"):
        ThreeDSharding(optimizer_bytes=-1)
    with pytest.raises(ValueError, match="weight_bytes: must be at least 1"):
        attrs.evolve(ThreeDSharding(), weight_bytes=0)
    with pytest.raises(ValueError, match="stage"):
        Zero(stage=4)


@pytest.mark.parametrize(
    ("config", "recomputes"),
    [
        (FSDPConfig, "activation_checkpointing"),
        (DeepSpeedConfig, "activation_checkpointing"),
        (MegatronConfig, "recompute"),
    ],
)
def test_on_cuda_backends_compute_in_bfloat16_and_large_models_are_recomputed(config, recomputes):
    large = {
        "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 6144, "vocab_size": 32000, "tie_word_embeddings": True,
    }  # fmt: skip
    assert config.defaults_on("cpu", large) == {}
    assert config.defaults_on("cuda", large) == {"precision": "bf16", recomputes: True}
    small = {**large, "num_hidden_layers": 2}
    assert config.defaults_on("cuda", small) == {"precision": "bf16", recomputes: False}
    assert getattr(config(**config.defaults_on("cuda", large)), recomputes) is True
