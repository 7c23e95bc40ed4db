"""Drawing from (seed, position): published numbers, and tokens counted out by hand."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch

from hybridflow.kit import sampling
from hybridflow.kit.sampling import draw, invert, uniforms

PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
"""What splitmix64 gives first from the seed 1234567 (rosettacode.org, Splitmix64)."""
WRAP = 1 << 64


def unmixed(z: int) -> int:
    """The number that splitmix64's finaliser makes `z` of: its steps undone, last one first."""
    z ^= z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, WRAP) % WRAP
    z ^= z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, WRAP) % WRAP
    return z ^ z >> 30 ^ z >> 60


def signed(z: int) -> int:
    return z - WRAP if z >= WRAP // 2 else z


def test_positions_are_the_published_stream_of_the_mixed_seed():
    seed = (unmixed(1234567) - 0x9E3779B97F4A7C15) % WRAP
    found = uniforms(torch.tensor([signed(seed)]), torch.arange(1, 6))
    assert found.tolist() == [(number >> 40) / 2**24 for number in PUBLISHED]


def test_shapes_broadcast_and_each_number_is_that_of_its_seed_and_position_alone():
    table = uniforms(torch.arange(4)[:, None], torch.arange(3))
    assert table.shape == (4, 3) and len(set(table.flatten().tolist())) == 12
    assert uniforms(torch.tensor([3]), torch.tensor([2])).item() == table[3, 2].item()


PROBABILITIES = [0.1, 0.5, 0.15, 0.25]


def drawn(uniform: list[float], top_k=0, top_p=1.0, min_p=0.0) -> list[int]:
    """The token for each uniform number, from PROBABILITIES."""
    count = len(uniform)
    logprobs = torch.tensor(PROBABILITIES).log().repeat(count, 1)
    filters = torch.full((count,), top_k), torch.full((count,), top_p), torch.full((count,), min_p)
    return draw(logprobs, torch.tensor(uniform), *filters).tolist()


def test_without_filters_a_token_has_its_share_of_the_unit_interval():
    assert drawn([0.0, 0.09, 0.11, 0.59, 0.61, 0.74, 0.76, 0.999]) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("filters", "shares"),
    [
        ({"top_k": 2}, {1: 2 / 3, 3: 1 / 3}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 9}, {1: 0.5, 3: 0.25, 2: 0.15, 0: 0.1}),
        ({"top_p": 0.7}, {1: 2 / 3, 3: 1 / 3}),
        ({"top_p": 0.8}, {1: 5 / 9, 3: 2.5 / 9, 2: 1.5 / 9}),
        ({"top_p": 1e-6}, {1: 1.0}),
        ({"min_p": 0.25}, {1: 5 / 9, 3: 2.5 / 9, 2: 1.5 / 9}),
        ({"min_p": 0.4, "top_p": 0.6}, {1: 1.0}),  # of 2/3 and 1/3 the first is enough
        ({"top_k": 3, "top_p": 0.8}, {1: 2 / 3, 3: 1 / 3}),  # 0.75 of 0.9
    ],
    ids=str,
)
def test_filters_leave_the_most_likely_tokens_with_their_proportions(filters, shares):
    steps = 900
    uniform = ((np.arange(steps) + 0.5) / steps).tolist()
    counts = np.bincount(drawn(uniform, **filters), minlength=4)
    wanted = [steps * shares.get(token, 0.0) for token in range(4)]
    np.testing.assert_allclose(counts, wanted, atol=1.0)


def test_a_row_draws_the_same_token_alone_and_beside_rows_with_filters():
    rows = [
        (0.8, 0, 1.0, 0.0),
        (0.8, 2, 1.0, 0.0),
        (0.05, 0, 0.7, 0.0),
        (0.05, 0, 1.0, 0.0),
        (0.9, 0, 1.0, 0.25),
    ]
    alone = [drawn([uniform], *filters)[0] for uniform, *filters in rows]
    assert alone == [3, 3, 1, 0, 2]  # with a filter the most likely tokens come first

    uniform, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    logprobs = torch.tensor(PROBABILITIES).log().repeat(len(rows), 1)
    assert draw(logprobs, uniform, top_k, top_p, min_p).tolist() == alone


def test_a_cumulated_weight_is_inverted_against_its_total():
    cumulated = torch.tensor([[1.0, 1.0, 3.0, 4.0]])
    uniform = (0.0, 0.24, 0.25, 0.74, 0.75, 1.0)
    columns = [invert(cumulated, torch.tensor([[number]])).item() for number in uniform]
    assert columns == [0, 0, 2, 2, 3, 3]  # the second column has no weight, and the last is the end
    assert invert(cumulated, torch.tensor([[0.5]]), torch.tensor([[2.0]])).item() == 2


def test_on_a_gpu_sums_are_of_whole_numbers_and_give_the_same_tokens(monkeypatch):
    """The device is still a CPU: what is told apart is how it adds."""
    monkeypatch.setattr(sampling, "adds_in_order", lambda device: False)
    test_without_filters_a_token_has_its_share_of_the_unit_interval()
    assert drawn([0.0, 0.49, 0.51, 0.99], top_k=2) == drawn([0.0, 0.49, 0.51, 0.99], top_p=0.7)

    # 150,000 tokens, against sums of Python's own whole numbers
    probs = torch.randn(2, 150_000, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    exact = [[round(Fraction(p) * 2**40) for p in row] for row in probs.tolist()]
    ends = [list(accumulate(row)) for row in exact]
    uniform = [0.0, 0.3, 0.999999]
    expected = [[bisect_right(row, int(Fraction(u) * row[-1])) for u in uniform] for row in ends]
    found = [
        invert(sampling.cumulate(probs.clone()), torch.full((2, 1), u, dtype=torch.float64))[:, 0]
        for u in uniform
    ]
    assert torch.stack(found, dim=1).tolist() == expected


def test_sums_of_whole_numbers_do_not_depend_on_their_order(monkeypatch):
    monkeypatch.setattr(sampling, "adds_in_order", lambda device: False)
    parts = sampling.addable(torch.rand(150_000).softmax(-1))
    assert parts.dtype == torch.int64
    backwards = parts.flip(0).cumsum(0)
    assert parts.sum() == backwards[-1] == parts.view(300, 500).sum(0).sum()
    assert bool((backwards.diff() >= 0).all())
