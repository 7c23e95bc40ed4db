"""The work and the memory of one token, counted by hand."""

from __future__ import annotations

import itertools
from statistics import mean

import attrs
import pytest

from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.planner.tokens import active_params, cache_elements, read_share, trunk_flops

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


def test_a_token_meets_the_layers_and_the_head_but_only_some_experts():
    assert active_params(ModelSize(DENSE)) == 2 * LAYER + 50 * 8
    assert active_params(ModelSize(TIED)) == 2 * LAYER + 50 * 8
    one_expert = 64 + 32 + 32 + 64 + 8 + 3 * 48
    assert active_params(ModelSize(MIXTURE)) == 2 * one_expert + 50 * 8


def test_the_operations_of_a_token_are_two_per_weight_and_attention_to_what_is_before_it():
    length = 1000
    weights = 2 * (active_params(ModelSize(DENSE)) - 50 * 8)
    seen = mean(range(1, length + 1))  # tokens that a token attends to
    attention = (
        2 * 4 * (2 * 2 * seen) * 2
    )  # layers, heads; scores and sums, of two numbers each, an add and a product
    assert trunk_flops(ModelSize(DENSE), length / 2) == pytest.approx(weights + attention, rel=1e-3)
    assert trunk_flops(ModelSize(DENSE), 0) == weights


def test_a_token_leaves_a_key_and_a_value_for_each_head_and_layer():
    assert cache_elements(DENSE) == 2 * 2 * 2 * 2


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_the_weights_that_a_step_reads_are_the_mean_over_every_choice_of_experts(sequences):
    size = ModelSize(MIXTURE)
    unread = [3 - len(set(choice)) for choice in itertools.product(range(3), repeat=sequences)]
    read = 1 - 2 * mean(unread) * 3 * 48 / size.params
    assert read_share(size, sequences) == pytest.approx(read)
    assert read_share(ModelSize(DENSE), sequences) == 1.0
