"""Sizes of models, counted by hand."""

from __future__ import annotations

from math import prod

import attrs
import pytest
import torch

from hybridflow.core.values.model_shape import ModelShape, ModelSize

DENSE = ModelShape(
    hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, intermediate=12, vocab=50,
    layer={"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "up": (12, 8), "down": (8, 12), "norm": (8,)},
    before={"embed": (50, 8)}, after={"norm": (8,), "head": (50, 8)}, layer_prefix="h.{}.",
)  # fmt: skip
LAYER = 64 + 32 + 32 + 64 + 96 + 96 + 8
TIED = attrs.evolve(DENSE, after={"norm": (8,)}, ties={"head": "embed"})
MIXTURE = attrs.evolve(
    DENSE, experts=3, experts_per_token=1, expert_intermediate=6,
    layer={"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "norm": (8,)}
    | {f"expert{number}.{part}": (6, 8) for number in range(3) for part in ("gate", "up", "down")},
)  # fmt: skip


def test_parameters_are_named_in_the_order_of_the_model():
    shapes = DENSE.parameters()
    layers = [
        f"h.{number}.{name}"
        for number in (0, 1)
        for name in ("q", "k", "v", "o", "up", "down", "norm")
    ]
    assert list(shapes) == ["embed", *layers, "norm", "head"]
    assert shapes["h.1.up"] == (12, 8)
    assert DENSE.params(torch.float32)["head"].nbytes == 50 * 8 * 4
    assert DENSE.params()["head"].nbytes == 50 * 8 * 2


@pytest.mark.parametrize("shape", [DENSE, TIED, MIXTURE], ids=["dense", "tied", "mixture"])
def test_a_model_has_as_many_parameters_as_its_shapes_say(shape):
    assert ModelSize(shape).params == sum(prod(size) for size in shape.parameters().values())
    assert shape.tied == (shape is TIED)


def test_a_value_model_has_a_head_of_one_row_tied_or_not():
    assert ModelSize(DENSE, "value").params == 2 * LAYER + 50 * 8 + 8 + 8
    assert ModelSize(TIED, "value").params == 2 * LAYER + 50 * 8 + 8 + 8


def test_the_largest_stage_has_its_layers_and_the_embedding():
    assert ModelSize(DENSE).stage_params(1) == 2 * LAYER + 2 * 50 * 8 + 8
    assert ModelSize(DENSE).stage_params(2) == LAYER + 50 * 8


def test_adapters_on_every_matrix_are_the_trained_share():
    adapters = 2 * 3 * ((8 + 8) + (4 + 8) + (4 + 8) + (8 + 8) + (12 + 8) + (8 + 12))
    size = ModelSize(DENSE, adapter_rank=3)
    assert size.trained_share * size.params == pytest.approx(adapters)
    assert ModelSize(DENSE).trained_share == 1.0
    assert ModelSize(DENSE, adapter_rank=1000).trained_share == 1.0


@pytest.mark.parametrize(
    "tp, problems",
    [
        (2, []),
        (4, []),  # two ranks share each of the key/value heads
        (
            3,
            [
                "tp 3 does not divide the attention heads 4",
                "tp 3 neither divides nor is divided by the 2 key/value heads",
            ],
        ),
        (
            8,
            [
                "tp 8 does not divide the attention heads 4",
                "tp 8 does not divide the intermediate size 12",
            ],
        ),
    ],
)
def test_layers_are_cut_into_whole_heads_or_it_is_said_why_not(tp, problems):
    assert DENSE.tensor_parallel_problems(tp) == problems


def test_of_a_mixture_the_experts_are_cut():
    assert MIXTURE.tensor_parallel_problems(4) == ["tp 4 does not divide the intermediate size 6"]
