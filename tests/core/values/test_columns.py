"""One column: per row, per token (ragged) or objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hybridflow.core.values.columns import Column, as_column, compose, index_rows, tokens

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def ragged():
    return tokens(ROWS)


def lists(column):
    return [torch.as_tensor(row).tolist() if column.kind != "object" else row for row in column]


def test_what_makes_a_column_decides_its_kind():
    assert as_column(torch.zeros(2, 3)).kind == "row"
    assert as_column(np.zeros(2)).kind == "row"
    assert as_column(["a", b"b"]).kind == "object"
    assert as_column(ragged()).kind == "token"
    with pytest.raises(TypeError, match="got dict"):
        as_column({})


def test_lengths_that_do_not_add_up_to_the_values_are_refused():
    with pytest.raises(ValueError, match=r"sum\(lengths\) = 3 entries, got 4"):
        Column(torch.zeros(4), np.array([1, 2]))


@pytest.mark.parametrize(
    "column", [ragged(), Column(torch.arange(8).view(4, 2)), Column(list("abcd"))]
)
@pytest.mark.parametrize(
    "index",
    [slice(1, 3), slice(0, 0), slice(None), slice(3, 1), slice(None, None, 2), [2, 0, 2], [], [3]],
)
def test_taking_rows_is_what_it_is_on_a_list(column, index):
    rows = lists(column)
    expected = rows[index] if isinstance(index, slice) else [rows[i] for i in index]
    if column.kind == "row" and isinstance(index, slice) and index.step:
        index = list(range(4))[index]
    taken = column.take(index if isinstance(index, slice) else np.array(index, dtype=np.int64))
    assert lists(taken) == expected and taken.rows == len(expected)


def test_what_was_taken_shares_no_memory_unless_asked():
    for column in (ragged(), Column(torch.arange(4))):
        column.take(slice(0, 2)).values.fill_(-1)
        assert lists(column) != [[-1, -1, -1], [], [4], [5, 6]] and column.values[0] != -1
        column.take(slice(0, 2), copy=False).values.fill_(-1)
        assert column.values[0] == -1


def test_columns_behind_one_another_keep_their_rows():
    assert lists(Column.concat([ragged(), ragged().take(slice(0, 1))])) == [*ROWS, [1, 2, 3]]
    assert lists(Column.concat([Column(["a"]), Column(["b"])])) == ["a", "b"]


def test_an_empty_part_says_nothing_about_dtype_shape_or_kind():
    empty = Column(torch.zeros(0, dtype=torch.float32))
    whole = Column.concat([empty, Column(torch.ones(2, 3, dtype=torch.int64)), empty])
    assert whole.values.dtype == torch.int64 and whole.values.shape == (2, 3)
    assert lists(Column.concat([Column([]), ragged()])) == ROWS
    assert Column.concat([empty, empty]).values.dtype == torch.float32


def test_columns_of_different_kinds_cannot_follow_one_another():
    with pytest.raises(ValueError, match="kinds"):
        Column.concat([ragged(), Column(["a"])])


@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6), st.integers(0, 2))
def test_padding_and_cutting_again_gives_the_column_back(rows, extra):
    column = tokens(rows)
    wide = column.padded(fill=7, width=max(map(len, rows), default=0) + extra)
    assert [r.tolist()[: len(row)] for r, row in zip(wide, rows, strict=True)] == rows
    assert all(v == 7 for r, row in zip(wide, rows, strict=True) for v in r.tolist()[len(row) :])
    assert lists(Column.from_padded(wide, column.lengths)) == rows


def test_padding_refuses_what_is_not_ragged_and_widths_that_cut():
    with pytest.raises(ValueError, match="row column"):
        Column(torch.zeros(2)).padded()
    with pytest.raises(ValueError, match="width 2 is smaller than the longest row"):
        ragged().padded(width=2)


def test_tokens_take_lists_arrays_and_tensors_and_no_rows():
    column = tokens([[1], np.array([2, 3]), torch.tensor([4])], torch.int32)
    assert column.values.dtype == torch.int32 and lists(column) == [[1], [2, 3], [4]]
    assert tokens([], torch.float32).values.dtype == torch.float32 and tokens([]).rows == 0


slices = st.builds(slice, st.integers(0, 9), st.integers(0, 9), st.just(1))


@given(slices | st.lists(st.integers(0, 8), max_size=6).map(np.array), st.data())
def test_composed_indexes_are_one_after_the_other(outer, data):
    rows = np.arange(9)
    outer = outer if isinstance(outer, slice) else outer.astype(np.int64)
    first = rows[outer]
    inner = data.draw(
        slices | st.lists(st.integers(0, max(len(first) - 1, 0)), max_size=6 if len(first) else 0)
    )
    inner = inner if isinstance(inner, slice) else np.array(inner, dtype=np.int64)
    both = compose(outer, inner, 9)
    assert rows[both].tolist() == first[inner].tolist()
    assert index_rows(both, 9) == len(first[inner])
    assert compose(None, inner, 9) is inner and compose(outer, None, 9) is outer
