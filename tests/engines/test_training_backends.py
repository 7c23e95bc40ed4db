"""Megatron and DeepSpeed over ranks, against single-process Hugging Face: what tests/backends/fsdp asks of FSDP2."""

from __future__ import annotations

import attrs
import pytest
from helpers.paths import matrix
from helpers.training_check import assert_equal, check
from helpers.training_jobs import Setup, disagreeing_update, moved, staying, train
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.parallel import ParallelLayout

FOUR_LAYERS = "qwen2-deep"


def megatron(layout: ParallelLayout, **config) -> Setup:
    pytest.importorskip("megatron.core")
    return Setup("", layout=layout, backend="megatron", config=MegatronConfig(**config))


def deepspeed(stage: int, dp: int, **config) -> Setup:
    pytest.importorskip("deepspeed")
    return Setup(
        "",
        layout=ParallelLayout(dp=dp),
        backend="deepspeed",
        config=DeepSpeedConfig(stage=stage, **config),
    )


MEGATRON = {
    "tp2": (ParallelLayout(tp=2), {}),
    "pp2": (ParallelLayout(pp=2), {}),
    "dp2": (ParallelLayout(dp=2), {}),
    "tp2 pp2": (ParallelLayout(tp=2, pp=2), {}),
    "pp2 virtual 2": (ParallelLayout(pp=2), {"virtual_stages": 2}),
    "tp2 sequence parallel": (ParallelLayout(tp=2), {"sequence_parallel": True}),
    "tp2 pp2 sequence parallel": (ParallelLayout(tp=2, pp=2), {"sequence_parallel": True}),
    "tp2 recompute": (ParallelLayout(tp=2), {"recompute": True, "vocab_multiple": 1}),
    "tp2 pp2 dp2": (ParallelLayout(tp=2, pp=2, dp=2), {}),
    "tp2 pp2 dp2, Megatron's order": (
        ParallelLayout(tp=2, pp=2, dp=2, order="tp-cp-dp-pp"),
        {"vocab_multiple": 4},
    ),
}


@pytest.mark.parametrize("name", ["qwen2-deep", pytest.param("llama-deep", marks=matrix)])
@pytest.mark.parametrize("case", MEGATRON.values(), ids=MEGATRON.keys())
def test_megatron_trains_as_hugging_face_does(ranks, folder, name, case):
    layout, config = case
    check(ranks, folder, name, megatron(layout, **config), Blend())


@pytest.mark.parametrize(("stage", "dp"), [(1, 2), (2, 2), (3, 2), (3, 4)])
@pytest.mark.parametrize("name", ["qwen2-odd", "llama-odd"])
def test_deepspeed_trains_as_hugging_face_does(ranks, folder, name, stage, dp):
    check(ranks, folder, name, deepspeed(stage, dp), Blend())


@pytest.mark.parametrize(
    "setup",
    [
        lambda: megatron(ParallelLayout(dp=2, tp=2), precision="bf16"),
        lambda: megatron(ParallelLayout(pp=2)),
        lambda: deepspeed(2, 2, precision="bf16"),
        lambda: deepspeed(3, 2, precision="bf16"),
        lambda: deepspeed(3, 2, persist_elements=0),
    ],
    ids=["megatron bf16", "megatron", "zero 2 bf16", "zero 3 bf16", "zero 3"],
)
def test_training_goes_on_after_its_memory_was_given_back(ranks, folder, setup):
    """offload and onload do it on a GPU; `moved` sees that every storage is empty in between."""
    made = attrs.evolve(setup(), path=folder("qwen2-tied"))
    pairs = [(make_batch(7), Blend())]
    got = ranks(moved, made.layout.world, made, pairs, 2)
    want = ranks(train, made.layout.world, made, pairs, 2)
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b["parameters"])


@pytest.mark.parametrize(
    ("setup", "trained"),
    [
        (lambda: megatron(ParallelLayout(dp=2), precision="bf16"), True),
        (lambda: megatron(ParallelLayout(tp=2), precision="bf16"), False),
        (lambda: deepspeed(2, 2, precision="bf16"), True),
        (lambda: deepspeed(3, 2, precision="bf16"), True),
        (lambda: deepspeed(3, 2, precision="bf16"), False),
    ],
    ids=["megatron", "megatron frozen", "zero 2", "zero 3", "zero 3 frozen"],
)
def test_no_tensor_stays_when_all_parts_leave(ranks, folder, setup, trained):
    """Masters, moments and gradient buffers, by whatever name Megatron and DeepSpeed hold them, and frozen weights."""
    made = attrs.evolve(setup(), path=folder("qwen2-tied"))
    if not trained:
        made = attrs.evolve(made, optimizer=None)
    for left in ranks(staying, made.layout.world, made, [(make_batch(7), Blend())]):
        assert left == []


@pytest.mark.parametrize(
    "setup",
    [
        lambda: megatron(ParallelLayout(pp=2), virtual_stages=2),
        lambda: megatron(ParallelLayout(dp=2), precision="bf16"),
        lambda: deepspeed(1, 2),
        lambda: deepspeed(2, 2, precision="bf16"),
        lambda: deepspeed(3, 2),
    ],
    ids=["megatron pp 2", "megatron dp 2 bf16", "zero 1", "zero 2 bf16", "zero 3"],
)
def test_what_an_engine_did_not_say_stops_every_rank_and_leaves_nothing(ranks, folder, setup):
    made = attrs.evolve(setup(), path=folder(FOUR_LAYERS))
    found = ranks(disagreeing_update, made.layout.world, made, make_batch(6), Blend())
    for text, unchanged, alike in found:
        assert "MismatchError: an update after 0 steps: logprobs of the rollout engine" in text
        assert unchanged and alike
