"""Megatron's settings: what it can cut, what a model takes of a rank, and what the ranks hold."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.random_layouts import HIDDEN, LLAMA, VOCAB, counted

from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.model_shape import ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box

TP2, PP2 = ParallelLayout(tp=2), ParallelLayout(pp=2)
COUNT = counted(LLAMA)


@pytest.mark.parametrize(
    ("settings", "layout", "takes"),
    [
        ({}, TP2, True),
        ({}, ParallelLayout(tp=4), False),  # two key/value heads
        ({"sequence_parallel": True}, TP2, True),
        ({"sequence_parallel": True}, PP2, False),
        ({"virtual_stages": 2}, PP2, True),
        ({"virtual_stages": 2}, TP2, False),
        ({"virtual_stages": 3}, PP2, False),  # four layers
    ],
)
def test_what_it_takes(settings, layout, takes):
    assert MegatronConfig(**settings).takes(LLAMA, layout) is takes


def test_mixtures_of_experts_are_not_taken():
    mixture = attrs.evolve(LLAMA, experts=4)
    assert not MegatronConfig().takes(mixture, ParallelLayout())


@pytest.mark.parametrize(
    ("precision", "each"),
    # gradients are float32; masters and moments, of float32 weights the moments alone, are spread over dp
    [("fp32", 4 + 4 + 8 / 2), ("bf16", 2 + 4 + 12 / 2)],
)
def test_a_trained_model_takes_of_two_dp_ranks_so_much(precision, each):
    found = MegatronConfig(precision=precision).footprint(
        ModelSize(LLAMA), ParallelLayout(dp=2), True, 1
    )
    assert found.resident == pytest.approx(COUNT * each)
    halves = MegatronConfig(precision=precision).footprint(
        ModelSize(LLAMA), ParallelLayout(dp=2, tp=2), True, 1
    )
    assert halves.resident == pytest.approx(COUNT * each / 2)


@pytest.mark.parametrize(("multiple", "rows"), [(1, 105), (16, 112), (128, 128)])
def test_the_vocabulary_is_padded_on_each_rank_and_no_box_reaches_into_the_padding(multiple, rows):
    planned = MegatronConfig(vocab_multiple=multiple).planned_layout(LLAMA, TP2, torch.float32)
    head = [planned.held[rank]["lm_head.weight"] for rank in (0, 1)]
    assert head == [(Box((0, 0), (rows, HIDDEN)),), (Box((rows, 0), (VOCAB, HIDDEN)),)]


def test_virtual_stages_take_turns():
    planned = MegatronConfig(virtual_stages=2).planned_layout(LLAMA, PP2, torch.float32)
    layers = [
        {
            int(name.split(".")[2])
            for name, boxes in planned.held[rank].items()
            if boxes and "layers" in name
        }
        for rank in (0, 1)
    ]
    assert layers == [{0, 2}, {1, 3}]


def test_settings_that_cannot_be_are_refused():
    for name, value in {"precision": "fp16", "virtual_stages": 0, "vocab_multiple": 0}.items():
        with pytest.raises(ValueError, match=name):
            MegatronConfig(**{name: value})
