"""Settings of FSDP2: what is refused, which layouts a model takes, and what is planned of it."""

from __future__ import annotations

import pytest
import torch

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.huggingface.shapes import llama_shape

LORA = LoRAConfig(rank=4, alpha=8.0)


def shape(vocab=208):
    """Hidden size 32, 8 heads of 4, 4 key heads, 48 units."""
    return llama_shape(32, 1, 8, 4, 4, 48, vocab)


@pytest.mark.parametrize(("name", "value"), [("precision", "fp16"), ("replicas", 0)])
def test_a_setting_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        FSDPConfig(**{name: value})


@pytest.mark.parametrize(
    ("config", "vocab", "layout", "taken"),
    [
        (FSDPConfig(), 208, ParallelLayout(dp=3), True),
        (FSDPConfig(), 208, ParallelLayout(tp=4), True),
        (FSDPConfig(), 208, ParallelLayout(tp=8), False),  # 4 key heads
        (FSDPConfig(), 209, ParallelLayout(tp=2), False),
        (FSDPConfig(), 209, ParallelLayout(dp=2), True),
        (FSDPConfig(), 208, ParallelLayout(pp=2), False),
        (FSDPConfig(), 208, ParallelLayout(cp=2), False),
        (FSDPConfig(replicas=2), 208, ParallelLayout(dp=4, tp=2), True),
        (FSDPConfig(replicas=2), 208, ParallelLayout(dp=3), False),
        (FSDPConfig(lora=LORA), 208, ParallelLayout(tp=2), False),
        (FSDPConfig(lora=LORA), 208, ParallelLayout(dp=2), True),
    ],
)
def test_layouts_that_cut_the_model_into_whole_parts_are_taken(config, vocab, layout, taken):
    assert config.takes(shape(vocab), layout) is taken


def test_bytes_follow_the_precision_and_who_is_trained():
    """(bytes of a weight, bytes it is computed with, rank of adapters), trained and frozen."""

    def planned(**settings):
        config = FSDPConfig(**settings)
        both = [config.sharding(trained) for trained in (True, False)]
        return [(way.weight_bytes, way.compute_bytes, way.adapter_rank) for way in both]

    assert planned() == [(4, 4, 0), (4, 4, 0)]
    assert planned(precision="bf16") == [(4, 2, 0), (2, 2, 0)]
    assert planned(precision="bf16", lora=LORA) == [(2, 2, 4), (2, 2, 0)]


def test_options_that_trade_memory_for_time_are_planned():
    saves = dict(activation_checkpointing=True, cpu_offload=True, reshard_after_forward=False)
    way = FSDPConfig(**saves).sharding(True)
    assert (way.recompute, way.on_host, way.keeps_gathered) == (True, True, True)
    plain = FSDPConfig(replicas=2, wrap_min_parameters=7).sharding(True)
    assert (plain.recompute, plain.on_host, plain.keeps_gathered) == (False, False, False)
    assert (plain.replicas, plain.whole_below) == (2, 7)


def test_tensor_parallelism_cuts_first_and_dp_cuts_the_rows_of_each_piece():
    layout = ParallelLayout(dp=2, tp=2)
    planned = FSDPConfig().planned_layout(shape(), layout, torch.float32)
    last = planned.held[layout.rank(dp=1, tp=1)]
    block = "model.layers.0."
    assert last[f"{block}self_attn.q_proj.weight"] == (Box((24, 0), (32, 32)),)
    assert last[f"{block}self_attn.o_proj.weight"] == (Box((16, 16), (32, 32)),)
    assert last[f"{block}input_layernorm.weight"] == (Box((16,), (32,)),)
    assert last["model.embed_tokens.weight"] == (Box((156, 0), (208, 32)),)


def test_replicas_hold_the_same():
    layout = ParallelLayout(dp=4)
    planned = FSDPConfig(replicas=2).planned_layout(shape(), layout, torch.float32)
    assert planned.held[0] == planned.held[2]
    assert planned.held[1] == planned.held[3]
    assert planned.held[1]["model.norm.weight"] == (Box((16,), (32,)),)
