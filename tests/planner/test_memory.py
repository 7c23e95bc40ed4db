"""The memory model against measured bytes of tensors (bench/memory.py, docs/benchmarks.md), so that a change of it is noticed;
and its terms by hand."""

from __future__ import annotations

import pytest
from helpers.planned import changed, engines, laid_out, planned

from hybridflow.core.plugins import registry
from hybridflow.core.values.model_shape import ModelSize
from hybridflow.kit.huggingface.shapes import llama_shape
from hybridflow.planner import Cluster, PlannedModel, Task, Workload
from hybridflow.planner.memory import Memory
from hybridflow.planner.times import Simulator

SHAPES = {
    "tied": llama_shape(768, 6, 12, 12, 64, 2048, 16384, tied=True, qkv_bias=True),
    "gqa": llama_shape(1024, 4, 16, 4, 64, 2816, 8000),
    "deep": llama_shape(512, 12, 8, 2, 64, 1536, 24000),
    "wide": llama_shape(384, 4, 6, 2, 64, 1152, 100000, tied=True),
}
BY_LAYER = {"wrap_min_parameters": 1_000_000}
MEASURED = [
    # (Several micro-batches under fsdp: bench/dry_run.py; these were measured before each reduced its gradients.)
    # model, backend, settings, tp, (sequences, prompt, response), micro_batch_tokens, MB at rest, MB at the peak of an update
    ("tied", "fsdp", {}, 1, (8, 64, 64), 4096, 330, 1004),
    ("tied", "fsdp", {}, 2, (8, 64, 64), 4096, 331, 713),
    ("tied", "fsdp", {"activation_checkpointing": True}, 1, (16, 64, 64), 4096, 330, 881),
    ("tied", "fsdp", {"precision": "bf16"}, 1, (16, 64, 64), 4096, 330, 881),
    ("tied", "fsdp", BY_LAYER, 1, (16, 64, 64), 4096, 330, 907),
    ("tied", "fsdp", {}, 1, (32, 128, 128), 8192, 330, 2639),
    ("gqa", "fsdp", {}, 1, (16, 96, 32), 4096, 369, 932),
    ("gqa", "fsdp", BY_LAYER | {"precision": "bf16"}, 1, (16, 64, 64), 2048, 369, 701),
    ("deep", "fsdp", {}, 1, (16, 64, 64), 4096, 365, 1532),
    ("deep", "fsdp", {}, 2, (16, 32, 96), 2048, 365, 1315),
    ("deep", "fsdp", {"precision": "bf16"}, 2, (16, 32, 96), 2048, 365, 1083),
    ("deep", "fsdp", BY_LAYER, 1, (16, 64, 64), 1024, 365, 1203),
    (
        "deep",
        "fsdp",
        BY_LAYER | {"activation_checkpointing": True},
        1,
        (32, 96, 32),
        4096,
        365,
        773,
    ),
    ("wide", "fsdp", {}, 1, (64, 32, 96), 4096, 272, 4366),
    ("wide", "fsdp", {}, 2, (32, 32, 96), 4096, 272, 2506),
    ("wide", "fsdp", {"precision": "bf16"}, 1, (64, 32, 96), 4096, 272, 3958),
    ("tied", "deepspeed", {"stage": 1}, 1, (8, 64, 64), 4096, 551, 1072),
    ("tied", "deepspeed", {"stage": 2}, 1, (8, 64, 64), 4096, 551, 1007),
    ("tied", "deepspeed", {"stage": 2}, 1, (32, 128, 128), 8192, 551, 2541),
    ("tied", "deepspeed", {"stage": 2, "precision": "bf16"}, 1, (16, 64, 64), 4096, 441, 797),
    ("tied", "deepspeed", {"stage": 3}, 1, (8, 64, 64), 4096, 751, 1349),
    ("tied", "deepspeed", {"stage": 3}, 1, (32, 128, 128), 8192, 751, 2961),
    ("gqa", "deepspeed", {"stage": 2}, 1, (16, 96, 32), 1024, 615, 1182),
    ("deep", "deepspeed", {"stage": 2}, 1, (16, 64, 64), 1024, 608, 1437),
    ("deep", "deepspeed", {"stage": 3}, 1, (16, 96, 32), 2048, 814, 1870),
    ("deep", "deepspeed", {"stage": 3, "precision": "bf16"}, 1, (16, 64, 64), 4096, 650, 1248),
    ("wide", "deepspeed", {"stage": 2}, 1, (64, 32, 96), 4096, 453, 4366),
]


def bytes_of(model: PlannedModel, tp: int, length: tuple[int, int, int], dp: int):
    tasks = (Task("actor", "infer", length[0]), Task("actor", "train", length[0]))
    sim = Simulator.of(Cluster.of("a100-80gb", 1, 2).nodes[0], Workload(tasks, *length[1:]))
    return Memory(sim).bytes(model, laid_out(1, tp, dp))


@pytest.mark.parametrize(
    ("shape", "backend", "settings", "tp", "length", "micro", "rest", "peak"), MEASURED
)
def test_within_a_tenth_of_what_was_measured(
    shape, backend, settings, tp, length, micro, rest, peak
):
    config = registry().config_class("training_backend", backend)(**settings)
    model = PlannedModel(
        "actor", ModelSize(SHAPES[shape]), config, trained=True, micro_batch_tokens=micro
    )
    found = bytes_of(model, tp, length, 2 // tp)
    assert found.resident / 1e6 == pytest.approx(rest, rel=0.01)
    assert (found.resident + found.training) / 1e6 == pytest.approx(peak, rel=0.1)


def test_an_update_of_a_model_that_is_kept_whole_by_hand():
    """One layer of hidden 4, 2 heads of 2, intermediate 8, vocabulary 10; 1 sequence of 3 + 2 tokens."""
    shape = llama_shape(4, 1, 2, 2, 2, 8, 10, tied=True)
    model = planned(
        "actor",
        shape,
        trained=True,
        sharding="zero1",
        weight_bytes=4,
        optimizer_bytes=12,
        compute_bytes=4,
    )
    weights = (
        4 * 16 + 3 * 32 + 2 * 4 + 10 * 4 + 4
    )  # q, k, v, o; gate, up, down; norms; embedding; last norm
    assert model.size.params == weights == 212
    found = bytes_of(model, 1, (1, 3, 2), 1)
    assert found.resident == weights * (4 + 12)
    layer = 5 * (6 * 4 + 2 * (2 + 2) * 2 + 4 * 8) * 4  # 5 tokens; 72 numbers each
    logits = 2 * 10 * 4
    assert layer == 1440
    assert (
        found.training == layer + 3 * logits + 10 * 4 * 4
    )  # the beginning of the backward pass, the embedding's gradient
    reads = 5 * (4 * 4 + 3 * 8) * 4  # nothing is kept for a backward pass
    assert found.inference == max(reads, 2 * logits)
    again = bytes_of(changed(model, recompute=True), 1, (1, 3, 2), 1)
    back = 5 * (4 + 2 * 8) * 4  # gradients: of the layer's result, and twice of the MLP's units
    assert (
        again.training == 5 * 4 * 4 + layer + back
    )  # the head has finished when the layer runs again
    pieces = bytes_of(changed(model, logits_at_once=10), 1, (1, 3, 2), 1)  # one token's at a time
    assert (
        pieces.training == layer + back
    )  # more than 3 x 10 logits and the embedding's gradient, 280
    several = bytes_of(changed(model, micro_batch_tokens=5), 1, (2, 3, 2), 1)
    assert several.training == found.training + weights * 4  # gradients of the first micro-batch


def test_norms_keep_copies_in_float32_and_the_head_its_own_logits():
    """As above in bfloat16, without weights on the device: 5 tokens, 2 of them answered, 20 logits."""
    shape = llama_shape(4, 1, 2, 2, 2, 8, 10, tied=True)
    options = {"trained": True, "sharding": "zero1", "compute_bytes": 2, "weight_bytes": 2}
    found = bytes_of(planned("actor", shape, **options), 1, (1, 3, 2), 1)
    layer = 5 * ((2 * 4 + 2 * 2 * 2) * 4 + 2 * (2 * (2 + 2) * 2 + 4 * 8))
    head = 20 * (4 + 4 + 2)  # logits in float32, their softmax, and as the head made them
    back = 5 * (4 + 2 * 8) * 2
    begun = 3 * 20 * 4 + 10 * 4 * 2  # logits, softmax, gradient; the gradient of the table
    reads = 5 * (4 * 4 + 3 * 8) * 2
    assert found.inference == max(reads, head) and found.training == layer + max(head, back, begun)


def test_the_largest_stage_counts():
    model = planned("actor", llama_shape(4, 2, 2, 2, 2, 8, 10), weight_bytes=4)
    layer = 4 * 16 + 3 * 32 + 2 * 4
    sim = Simulator.of(
        Cluster.of("a100-80gb", 1, 2).nodes[0], Workload((Task("actor", "infer", 1),), 3, 2)
    )
    assert (
        Memory(sim).bytes(model, laid_out(2)).resident == (layer + 10 * 4) * 4
    )  # one, with the embedding


def test_an_engine_that_shares_weights_takes_what_a_rank_has_not():
    shape = llama_shape(4, 2, 2, 2, 2, 8, 10)
    model = planned(
        "actor", shape, trained=True, weight_bytes=2, rollout_bytes=2, shares_weights=True
    )
    sim = Simulator.of(
        Cluster.of("a100-80gb", 1, 2).nodes[0], Workload((Task("actor", "generate", 1),), 3, 2)
    )
    whole = model.size.params * 2

    def taken(of: PlannedModel, tp: int, engine_tp: int) -> float:
        return Memory(sim).engine_weights(of, laid_out(1, tp, 2 // tp), engines(2, 1, engine_tp))

    assert taken(model, 2, 2) == 0.0  # all of it is there
    assert taken(model, 2, 1) == whole / 2
    assert taken(changed(model, shares_weights=False), 2, 2) == whole / 2
    assert taken(changed(model, rollout_bytes=4), 2, 2) == whole  # of another dtype
    assert taken(changed(model, offload=True), 2, 2) == whole / 2  # it is away


@pytest.mark.parametrize(
    ("open_steps", "most", "decoded"), [(1, 256, 12), (3, 256, 36), (3, 20, 20)]
)
def test_an_engine_decodes_the_open_sequences_of_its_replica_as_far_as_it_may(
    open_steps, most, decoded
):
    """24 sequences on two replicas."""
    model = changed(
        planned("actor", llama_shape(4, 2, 2, 2, 2, 8, 10), trained=True), max_sequences=most
    )
    work = Workload((Task("actor", "generate", 24),), 3, 2, open_steps=open_steps)
    sim = Simulator.of(Cluster.of("a100-80gb", 1, 2).nodes[0], work)
    assert Memory(sim).decoded(model, engines(2)) == decoded
