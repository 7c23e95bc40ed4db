"""Random columns: of the shape's rows, in the ranges that a run gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.kit.testing.random_columns import K, RowShapes, standard_column, standard_output


def pairs():
    return RowShapes.random(rows=40, longest=9, unit_size=2, unit="pair", seed=3)


def values_of(name, shape):
    return torch.as_tensor(standard_column(name, shape).values)


def test_rows_have_lengths_up_to_the_longest_which_comes_and_units_of_neighbours():
    shape = pairs()
    assert shape.rows == 40
    assert shape.lengths.min() >= 1
    assert shape.lengths[0] == shape.lengths.max() == 9
    assert shape.units.tolist() == [row // 2 for row in range(40)]


def test_a_seed_gives_the_same_rows_and_numbers_and_another_seed_others():
    one, again, other = (RowShapes.random(12, 9, 1, "row", seed) for seed in (5, 5, 6))
    assert one.lengths.tolist() == again.lengths.tolist() != other.lengths.tolist()
    assert torch.equal(one.per_row(), again.per_row())


def test_numbers_are_uniform_in_a_range_or_normal_without_one():
    shape = pairs()
    uniform = shape.per_token(2.0, 3.0, trailing=(50,))
    assert uniform.values.shape == (shape.lengths.sum(), 50)
    assert uniform.lengths.tolist() == shape.lengths.tolist()
    assert uniform.values.min() >= 2 and uniform.values.max() < 3
    normal = shape.per_token(trailing=(50,)).values
    assert abs(float(normal.mean())) < 0.1 and abs(float(normal.std()) - 1) < 0.1
    assert shape.per_row(0.0, 1.0).shape == (40,)


def test_every_row_has_a_token_that_counts_and_some_tokens_do_not():
    shape = pairs()
    mask = standard_column("loss_mask", shape)
    assert {int(n) for n in torch.as_tensor(mask.values).unique()} == {0, 1}
    assert all(row[0] == 1 for row in mask)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("old_logprobs", -3, 0), ("entropy", 0, 3), ("response_ids", 0, 49), ("topk_ids", 0, 49)],
)
def test_columns_per_token_lie_in_their_ranges(name, low, high):
    shape = pairs()
    values = values_of(name, shape)
    assert len(values) == shape.lengths.sum()
    assert low <= values.min() < values.max() <= high


def test_the_largest_logprobs_are_some_of_a_distribution():
    shape = pairs()
    values = values_of("ref_topk_logprobs", shape)
    assert values.shape == (shape.lengths.sum(), K)
    assert values.exp().sum(-1).max() < 1


def test_units_and_which_of_a_pair_is_preferred_go_by_the_shape():
    shape = pairs()
    assert standard_column("pair", shape).tolist() == shape.units.tolist()
    assert standard_column("preferred", shape).tolist() == [True, False] * 20


def test_a_unit_of_the_losss_own_has_a_column():
    shape = RowShapes.random(9, 4, 3, "episode_part", 0)
    assert standard_column("episode_part", shape).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_an_unknown_column_says_what_to_override():
    shape = pairs()
    with pytest.raises(LookupError, match="'confidence'; override columns"):
        standard_column("confidence", shape)


def test_new_logprobs_lie_around_the_old_ones_so_that_ratios_are_clipped_and_not():
    shape = pairs()
    old = standard_column("old_logprobs", shape)
    new = torch.cat(standard_output("logprobs", shape, {"old_logprobs": old}))
    ratios = (new - torch.as_tensor(old.values)).exp()
    clipped = ((ratios < 0.8) | (ratios > 1.2)).float().mean()
    assert 0.2 < clipped < 0.8


def test_new_values_lie_around_the_old_ones():
    shape = pairs()
    old = standard_column("values", shape)
    new = torch.cat(standard_output("values", shape, {"values": old}))
    moved = (new - torch.as_tensor(old.values)).std()
    assert 0.1 < moved < 0.5


def test_outputs_are_one_tensor_a_row_and_scores_one_number():
    shape = pairs()
    entropy = standard_output("entropy", shape, {})
    assert [len(row) for row in entropy] == shape.lengths.tolist()
    scores = standard_output("scores", shape, {})
    assert [score.shape for score in scores] == [()] * 40
    assert len(np.unique([float(score) for score in scores])) == 40
