"""Rows into micro-batches, and their outputs back into rows."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hybridflow.core.contracts.training import Packing
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.workers.micro_batch import (
    OVERHEAD_TOKENS,
    dummy_micro_batch,
    make_micro_batch,
    plan_micro_batches,
    unpad,
)

CPU = torch.device("cpu")
lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(np.array)


@st.composite
def rows_in_units(draw):
    lengths = draw(lengths_of)
    units = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    return lengths, np.array(units)


def cost(lengths, plan, overhead) -> int:
    return sum(len(rows) * int(lengths[rows].max()) + overhead for rows in plan)


def cheapest(lengths, units, budget, overhead) -> float:
    """Over all ways to cut the units in order of their length."""
    names = np.unique(units)
    parts = sorted((int(lengths[units == u].max()), int((units == u).sum())) for u in names)
    best = np.inf
    for cuts in product((False, True), repeat=len(parts) - 1):
        groups = [[parts[0]]]
        for part, cut in zip(parts[1:], cuts, strict=True):
            if cut:
                groups.append([part])
            else:
                groups[-1].append(part)
        sizes = [max(n for n, _ in g) * sum(rows for _, rows in g) for g in groups]
        if all(size <= budget or len(g) == 1 for size, g in zip(sizes, groups, strict=True)):
            best = min(best, sum(sizes) + overhead * len(groups))
    return best


@settings(deadline=None)
@given(lengths_of, st.integers(1, 400))
def test_every_row_is_in_one_micro_batch_and_none_exceeds_the_budget(lengths, budget):
    plan = plan_micro_batches(lengths, budget)
    assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= budget for rows in plan)


@settings(deadline=None)
@given(rows_in_units(), st.integers(1, 400))
def test_units_stay_whole_and_alone_may_exceed_the_budget(rows, budget):
    lengths, units = rows
    plan = plan_micro_batches(lengths, budget, units)
    assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
    held = [set(units[rows]) for rows in plan]
    assert sum(map(len, held)) == len(set(units))
    assert all(
        len(u) == 1 or len(r) * lengths[r].max() <= budget for u, r in zip(held, plan, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(1, 80),
    st.integers(0, 30),
)
def test_no_other_cut_of_the_sorted_units_is_cheaper(rows, budget, overhead):
    lengths, units = (np.array(column) for column in zip(*rows, strict=True))
    plan = plan_micro_batches(lengths, budget, units, overhead)
    assert cost(lengths, plan, overhead) == cheapest(lengths, units, budget, overhead)
    alone = plan_micro_batches(lengths[:9], budget, None, overhead)
    assert cost(lengths, alone, overhead) == cheapest(
        lengths[:9], np.arange(len(lengths[:9])), budget, overhead
    )


@settings(deadline=None)
@given(rows_in_units(), st.integers(1, 400))
def test_a_plan_is_the_same_every_time(rows, budget):
    first, second = (plan_micro_batches(rows[0], budget, rows[1]) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_little_padding_is_cheaper_than_one_more_forward_and_much_is_not():
    few, many = np.array([10] * 4 + [40] * 4), np.array([10] * 40 + [400] * 4)
    assert OVERHEAD_TOKENS == 256
    assert len(plan_micro_batches(few, 100_000)) == 1
    assert [len(rows) for rows in plan_micro_batches(many, 100_000)] == [40, 4]


def test_no_rows_give_no_micro_batches():
    assert plan_micro_batches(np.zeros(0, dtype=np.int64), 100) == []


def test_many_lengths_are_planned_within_the_budget():
    lengths = np.random.default_rng(0).integers(1, 5000, 3000)
    plan = plan_micro_batches(lengths, 16384)
    assert sorted(np.concatenate(plan)) == list(range(3000))
    assert cost(lengths, plan, 0) < 1.1 * lengths.sum()


@settings(deadline=None)
@given(rows_in_units(), st.integers(1, 400), st.booleans())
def test_packed_micro_batches_are_filled_with_whole_units(rows, budget, in_units):
    lengths, units = rows
    given_units = units if in_units else None
    units = units if in_units else np.arange(len(lengths))
    plan = plan_micro_batches(lengths, budget, given_units, packing=Packing.PACKED)
    assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
    held = [list(dict.fromkeys(units[rows])) for rows in plan]
    assert sum(map(len, held)) == len(set(units))
    for at, rows in enumerate(plan):
        tokens_of = lengths[rows].sum()
        assert tokens_of <= budget or len(held[at]) == 1
        # The next unit would not have fitted.
        if at + 1 < len(plan):
            assert tokens_of + lengths[units == held[at + 1][0]].sum() > budget


def test_packed_rows_lie_ascending_by_length_and_keep_their_numbers():
    prompts, responses = tokens([[1, 2], [3], [4, 5, 6]]), tokens([[7, 9], [8], []], torch.int64)
    micro = make_micro_batch(prompts, responses, np.array([0, 1, 2]), CPU, packing=Packing.PACKED)
    assert micro.ids.tolist() == [[3, 8, 4, 5, 6, 1, 2, 7, 9]]
    assert micro.prompt_at.tolist() == [5, 0, 2]
    assert micro.response_at.tolist() == micro.response_starts.tolist() == [7, 1, 5]
    assert not micro.shared.any()
    assert micro.prompt_lengths.tolist() == [2, 1, 3]
    assert micro.rows == 3
    assert micro.width == 2


def test_a_prompt_that_rows_share_is_there_once():
    prompts = tokens([[1, 2], [3], [1, 2], [4, 5], [1, 2], [4, 5]])
    responses = tokens([[6, 7, 8], [9], [6], [7, 7], [], [8]])
    micro = make_micro_batch(prompts, responses, np.arange(6), CPU, packing=Packing.SHARED)
    # Both prompts and row 1 by number, then responses to the prompts by length.
    assert micro.ids.tolist() == [[1, 2, 3, 9, 4, 5, 6, 8, 7, 7, 6, 7, 8]]
    assert micro.prompt_at.tolist() == [0, 2, 0, 4, 0, 4]
    assert micro.response_at.tolist() == [10, 3, 6, 8, 6, 7]
    assert micro.shared.tolist() == [True, False, True, True, True, True]
    packed = make_micro_batch(prompts, responses, np.arange(6), CPU, packing=Packing.PACKED)
    assert packed.ids.numel() == 19
    assert not packed.shared.any()
    alike = make_micro_batch(prompts, responses, np.array([2, 5]), CPU, packing=Packing.SHARED)
    assert alike.ids.tolist() == [[1, 2, 6], [4, 5, 8]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=24),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_plan_counts_a_prompt_once_and_splits_a_group_only_where_it_must(rows, budget, in_units):
    drawn = [[1], [2, 2, 2], [3, 3, 3], [4] * 7]
    prompts = tokens([drawn[prompt] for prompt, _ in rows])
    responses = tokens([[5] * length for _, length in rows])
    lengths = prompts.lengths + responses.lengths
    units = np.arange(len(rows)) // 2 if in_units else None
    plan = plan_micro_batches(lengths, budget, units, packing=Packing.SHARED, prompts=prompts)
    assert sorted(np.concatenate(plan)) == list(range(len(rows)))

    def size(chosen):
        """Tokens by brute force: each distinct prompt once."""
        return sum(rows[r][1] for r in chosen) + sum(
            len(drawn[p]) for p in {rows[r][0] for r in chosen}
        )

    for chosen in plan:
        micro = make_micro_batch(prompts, responses, chosen, CPU, packing=Packing.SHARED)
        if micro.packed:
            assert micro.ids.numel() == size(chosen)
        whole = {r // 2 for r in chosen} if in_units else chosen
        # A prompt that leaves no room for a response exceeds the budget by itself.
        prompts_of = {rows[r][0] for r in chosen}
        full = len(prompts_of) == 1 and len(drawn[prompts_of.pop()]) >= budget
        assert size(chosen) <= budget or len(whole) == 1 or (full and not in_units)
    if in_units:
        assert all({r // 2 for r in a}.isdisjoint(r // 2 for r in b) for a, b in pairwise(plan))
        return
    for prompt in range(4):
        group = [r for r, (p, _) in enumerate(rows) if p == prompt]
        if group and size(group) <= budget:
            assert any(set(group) <= set(chosen) for chosen in plan)


def test_rows_of_one_length_are_a_rectangle_packed_or_not():
    prompts, responses = tokens([[1, 2], [3]]), tokens([[7], [8, 9]])
    micro = make_micro_batch(prompts, responses, np.array([1, 0]), CPU, packing=Packing.PACKED)
    assert micro.ids.tolist() == [[3, 8, 9], [1, 2, 7]]
    assert not micro.packed
    assert micro.response_starts.tolist() == [1, 5]


def test_long_tailed_rows_are_packed_with_two_tokens_in_a_hundred_to_spare_at_most():
    """The draw of bench/grpo_step.py: mean 26, largest 128."""
    draw = np.random.default_rng(7)
    lengths = 6 + np.clip(draw.exponential(24, 128).astype(int) + 1, 1, 128)
    prompts, responses = tokens([[1] * 6] * 128), tokens([[1] * (n - 6) for n in lengths])
    for budget in (300, 2048, 16384):
        plan = plan_micro_batches(lengths, budget, packing=Packing.PACKED)
        micros = [
            make_micro_batch(prompts, responses, rows, CPU, packing=Packing.PACKED) for rows in plan
        ]
        assert sum(micro.ids.numel() for micro in micros) == lengths.sum()
        assert len(plan) <= np.ceil(lengths.sum() / budget) * 1.5


def test_a_micro_batch_puts_the_response_behind_the_prompt():
    prompts, responses = tokens([[1, 2], [3], [4, 5, 6]]), tokens([[7], [8, 9], []], torch.int64)
    micro = make_micro_batch(prompts, responses, np.array([2, 0, 1]), CPU)
    assert micro.ids.tolist() == [[4, 5, 6], [1, 2, 7], [3, 8, 9]]
    assert micro.prompt_lengths.tolist() == [3, 2, 1]
    assert micro.response_lengths.tolist() == [0, 1, 2]
    assert micro.width == 2
    assert [x.tolist() for x in micro.places] == [[1, 2, 2], [0, 0, 1]]
    assert not micro.dummy


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(HybridFlowError, match="row 1 has an empty prompt"):
        make_micro_batch(tokens([[1], [], [2]]), tokens([[1], [1], [1]]), np.array([0, 1]), CPU)


def test_top_k_ids_are_padded_with_the_responses():
    ids = tokens([torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])])
    micro = make_micro_batch(tokens([[1], [1]]), tokens([[1, 1], [1]]), np.array([1, 0]), CPU, ids)
    assert micro.topk_ids.tolist() == [[[5, 6], [0, 0]], [[1, 2], [3, 4]]]


def test_a_dummy_is_one_row_of_two_tokens():
    dummy = dummy_micro_batch(CPU, topk=3)
    assert dummy.dummy
    assert dummy.ids.shape == (1, 2)
    assert dummy.topk_ids.shape == (1, 1, 3)
    assert dummy.response_lengths.tolist() == [1]


@settings(deadline=None)
@given(lengths_of, st.integers(1, 200), st.sampled_from([(), (3,)]))
def test_outputs_come_back_in_the_order_of_the_rows(lengths, budget, trailing):
    want = Column(torch.rand(int(lengths.sum()), *trailing), lengths)
    plan = plan_micro_batches(lengths, budget)
    got = unpad([want.take(rows).padded() for rows in plan], plan, lengths)
    assert torch.equal(got.values, want.values)
    assert np.array_equal(got.lengths, lengths)
