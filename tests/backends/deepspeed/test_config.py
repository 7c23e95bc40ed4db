"""DeepSpeed's settings: what contradicts itself, what a model takes of a rank, and what the ranks hold."""

from __future__ import annotations

import pytest
import torch
from helpers.random_layouts import LLAMA, QWEN, counted

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.core.values.model_shape import ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.config import LoRAConfig

DP4 = ParallelLayout(dp=4)
COUNT = counted(LLAMA)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 2, "offload_parameters": True}, "offload_parameters needs stage 3, got stage 2"),
        ({"adam": "cpu"}, "adam 'cpu' steps on the CPU: set offload_optimizer = true"),
        ({"stage": 0}, "stage"),
        ({"precision": "fp16"}, "precision"),
        ({"bucket_elements": 0}, "bucket_elements"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        DeepSpeedConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        # weights whole, twelve bytes of masters and moments in four; gradients are not kept
        ({"stage": 1}, COUNT * 4 + COUNT * 12 / 4),
        ({"stage": 2, "precision": "bf16"}, COUNT * 2 + COUNT * 12 / 4),
        ({"stage": 2, "offload_optimizer": True}, COUNT * 4),
        # weights and gradients in four too, and a bucket of a thousand elements
        ({"stage": 3, "bucket_elements": 1000}, COUNT * (4 + 4 + 12) / 4 + 4000),
        (
            {"stage": 3, "bucket_elements": 1000, "precision": "bf16"},
            COUNT * (2 + 4 + 12) / 4 + 2000,
        ),
    ],
)
def test_a_trained_model_takes_of_four_ranks_so_much(settings, nbytes):
    found = DeepSpeedConfig(**settings).footprint(ModelSize(LLAMA), DP4, True, 1)
    assert found.resident == pytest.approx(nbytes)


def test_a_frozen_model_has_weights_alone_and_its_adapters_are_none():
    config = DeepSpeedConfig(stage=2, lora=LoRAConfig(rank=4))
    assert config.footprint(ModelSize(LLAMA), DP4, False, 1).resident == COUNT * 4
    assert (config.execution(True).adapter_rank, config.execution(False).adapter_rank) == (4, 0)


@pytest.mark.parametrize(
    ("layout", "takes"),
    [
        (DP4, True),
        (ParallelLayout(), True),
        (ParallelLayout(dp=2, tp=2), False),
        (ParallelLayout(pp=2), False),
    ],
)
def test_ranks_are_spread_over_data_alone(layout, takes):
    assert DeepSpeedConfig().takes(LLAMA, layout) is takes


def test_stage_three_cuts_each_parameter_into_flat_ranges():
    planned = DeepSpeedConfig().planned_layout(QWEN, ParallelLayout(dp=2), torch.bfloat16)
    name = "model.layers.0.self_attn.k_proj.bias"  # 16 elements
    assert [planned.held[rank][name] for rank in (0, 1)] == [
        (Box((0,), (8,)),),
        (Box((8,), (16,)),),
    ]
    head = "model.embed_tokens.weight"  # 211 rows of 32: 3376 elements each, 105 rows and a half
    assert planned.held[0][head] == (Box((0, 0), (105, 32)), Box((105, 0), (106, 16)))
    assert planned.nbytes(0) + planned.nbytes(1) == counted(QWEN) * 2
    assert planned.ties == {"lm_head.weight": head}


def test_the_other_stages_hold_everything_on_every_rank():
    planned = DeepSpeedConfig(stage=2).planned_layout(LLAMA, ParallelLayout(dp=2), torch.float32)
    assert [planned.nbytes(rank) for rank in (0, 1)] == [COUNT * 4, COUNT * 4]
