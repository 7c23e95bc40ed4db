"""A batch is a list of rows, wherever its columns are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.batches import CountingStore, plain, promised, rows_of, sent
from hypothesis import given, settings, strategies as st

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups import wire
from hybridflow.core.values.batch import Batch, PromisedTable, View
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics


def make(rows, start=0):
    """`rows` rows that can be told apart, one column of every sort; the same as a list of dicts."""
    numbers = list(range(start, start + rows))
    lengths = [n * 7 % 4 for n in numbers]
    values = [
        [float(n + t) for t in range(length)] for n, length in zip(numbers, lengths, strict=True)
    ]
    pairs = [[[v, -v] for v in row] for row in values]
    batch = Batch(
        {
            "number": torch.tensor(numbers, dtype=torch.int64),
            "matrix": torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1).expand(-1, 2, 3),
            "ids": tokens(values, torch.int32),
            "pairs": Column(
                torch.tensor([p for row in pairs for p in row], dtype=torch.bfloat16).view(-1, 2),
                np.array(lengths, int),
            ),
            "meta": [{"row": n, "raw": bytes([n % 256])} for n in numbers],
        }
    )
    expected = [
        {
            "number": float(n),
            "matrix": [[float(n)] * 3] * 2,
            "ids": row,
            "pairs": pair,
            "meta": {"row": n, "raw": bytes([n % 256])},
        }
        for n, row, pair in zip(numbers, values, pairs, strict=True)
    ]
    return batch, expected


class Model:
    """A batch, and the list of rows that it stands for, changed side by side."""

    def __init__(self, batch, rows, names, start):
        self.batch, self.rows, self.names, self.start = batch, rows, list(names), start
        self.cuts = None

    def select(self, data):
        kept = (
            data.draw(st.lists(st.sampled_from(self.names), min_size=1, unique=True))
            if self.names
            else []
        )
        self.batch = self.batch.select(kept)
        self.names = kept
        self.rows = [{n: row[n] for n in kept} for row in self.rows]

    def take(self, data):
        count = len(self.rows)
        how = data.draw(st.sampled_from(["slice", "index", "mask"]))
        if how == "slice":
            bound = st.none() | st.integers(-count - 1, count + 1)
            index = slice(
                data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1]))
            )
            self.batch, self.rows = self.batch.take(index), self.rows[index]
        elif how == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
            self.batch = self.batch.take(np.array(mask, dtype=bool))
            self.rows = [row for row, kept in zip(self.rows, mask, strict=True) if kept]
        else:
            index = data.draw(st.lists(st.integers(-count, count - 1), max_size=8)) if count else []
            self.batch, self.rows = self.batch.take(index), [self.rows[i] for i in index]

    def split(self, data):
        parts = data.draw(st.integers(1, 4))
        pieces = self.batch.split(parts)
        cuts = self.cuts or list(range(len(self.rows) + 1))
        sizes = [
            cuts[p[-1] + 1] - cuts[p[0]] if len(p) else 0
            for p in np.array_split(np.arange(len(cuts) - 1), parts)
        ]
        assert [p.rows for p in pieces] == sizes
        ends = np.cumsum([0, *sizes])
        order = data.draw(st.permutations(range(parts)))
        self.batch = Batch.concat([pieces[i] for i in order])
        self.rows = [row for i in order for row in self.rows[ends[i] : ends[i + 1]]]

    def concat(self, data):
        times = data.draw(st.integers(1, 2))
        self.batch = Batch.concat([self.batch] * (times + 1))
        self.rows = self.rows * (times + 1)

    def repeat(self, data):
        times = data.draw(st.integers(0, 3))
        self.batch = self.batch.repeat(times)
        self.rows = [row for row in self.rows for _ in range(times)]

    def whole(self, data):
        units = data.draw(
            st.lists(st.integers(0, 2), min_size=len(self.rows), max_size=len(self.rows))
        )
        self.batch = self.batch.whole(np.array(units, dtype=np.int64))
        self.rows = [
            row for _, row in sorted(zip(units, self.rows, strict=True), key=lambda pair: pair[0])
        ]
        self.cuts = list(np.cumsum([0, *(units.count(u) for u in sorted(set(units)))]))

    def join(self, data):
        other, rows = make(len(self.rows), self.start)
        other, rows = data.draw(st.sampled_from(SOURCES))(other), rows
        kept = data.draw(
            st.lists(st.sampled_from(sorted(rows[0]) if rows else ["ids"]), min_size=1, unique=True)
        )
        other = other.select(kept)
        self.batch = self.batch.join(other)
        self.names = list(dict.fromkeys([*self.names, *kept]))
        self.rows = [
            row | {n: more[n] for n in kept} for row, more in zip(self.rows, rows, strict=True)
        ]

    def rename(self, data):
        if self.names:
            old = data.draw(st.sampled_from(self.names))
            new = data.draw(
                st.sampled_from(
                    [n for n in ("first", "second", "third") if n not in self.names] or [old]
                )
            )
            self.batch = self.batch.rename(**{old: new})
            self.names = [new if n == old else n for n in self.names]
            self.rows = [{(new if n == old else n): v for n, v in row.items()} for row in self.rows]

    def with_columns(self, data):
        values = data.draw(
            st.lists(st.integers(-99, 99), min_size=len(self.rows), max_size=len(self.rows))
        )
        self.batch = self.batch.with_columns(
            extra=torch.tensor(values, dtype=torch.int64), label=list(map(str, values))
        )
        self.names = list(dict.fromkeys([*self.names, "extra", "label"]))
        self.rows = [
            row | {"extra": float(v), "label": str(v)}
            for row, v in zip(self.rows, values, strict=True)
        ]

    def drop(self, data):
        if len(self.names) > 1:
            gone = data.draw(st.sampled_from(self.names))
            self.batch, self.names = self.batch.drop([gone]), [n for n in self.names if n != gone]
            self.rows = [{n: v for n, v in row.items() if n != gone} for row in self.rows]

    def read(self, data):
        if self.names:
            name = data.draw(st.sampled_from(self.names))
            assert plain(self.batch[name]) == [row[name] for row in self.rows]

    def move(self, data):
        self.batch = data.draw(st.sampled_from(SOURCES))(self.batch)

    def check(self):
        assert self.batch.rows == len(self.rows) == len(self.batch)
        assert sorted(self.batch.names) == sorted(self.names)
        assert all(name in self.batch for name in self.names) and "nobody" not in self.batch
        assert rows_of(self.batch) == self.rows


def is_local(batch):
    return batch


def went_through_the_wire(batch):
    return sent(batch)


def is_pending(batch):
    return promised(batch)


def is_pending_and_tells_nothing(batch):
    return promised(batch, rows=False, names=False)


SOURCES = (is_local, went_through_the_wire, is_pending, is_pending_and_tells_nothing)
OPERATIONS = [
    "select",
    "take",
    "split",
    "concat",
    "repeat",
    "whole",
    "join",
    "rename",
    "with_columns",
    "drop",
    "read",
]
OPERATIONS += ["move"]


@pytest.mark.parametrize(
    "inline_bytes", [0, wire.INLINE_BYTES], ids=["by handle", "inside the message"]
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 7), st.lists(st.sampled_from(OPERATIONS), max_size=7), st.data())
def test_a_batch_is_a_list_of_rows_whatever_is_done_to_it(
    source, inline_bytes, rows, operations, data
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "INLINE_BYTES", inline_bytes)
        patch.setattr(wire, "OWN_OBJECT_BYTES", 64)
        batch, expected = make(rows)
        model = Model(
            source(batch), expected, ["number", "matrix", "ids", "pairs", "meta"], start=100
        )
        for operation in operations:
            if len(model.rows) <= 64:
                getattr(model, operation)(data)
            if model.batch._cuts is None:  # other rows, other units
                model.cuts = None
        model.check()


def stored(monkeypatch, parts=2, rows=6):
    """A batch of `parts` stored tables, each column an object of its own, and the store."""
    monkeypatch.setattr(wire, "INLINE_BYTES", 0)
    monkeypatch.setattr(wire, "OWN_OBJECT_BYTES", 1)
    store = CountingStore()
    batch, expected = make(rows)
    pieces = [sent(piece, store) for piece in batch.split(parts)]
    return Batch.concat(pieces), expected, store


def test_nothing_is_fetched_until_a_column_is_read_and_then_that_column_alone(monkeypatch):
    batch, expected, store = stored(monkeypatch)
    changed = (
        batch.take([5, 0, 3])
        .repeat(2)
        .rename(ids="response_ids")
        .join(batch.take([5, 0, 3]).repeat(2))
    )
    assert changed.rows == 6 and "ids" in changed and len(changed.split(4)) == 4
    assert store.fetched == []
    assert plain(changed["response_ids"])[0] == expected[5]["ids"]
    assert len(store.fetched) == 2  # this column of both tables
    changed["response_ids"]
    assert len(store.fetched) == 2


def test_only_the_tables_that_hold_the_rows_are_fetched(monkeypatch):
    batch, expected, store = stored(monkeypatch, parts=3)
    assert plain(batch.take(slice(2, 4))["meta"]) == [row["meta"] for row in expected[2:4]]
    assert len(store.fetched) == 1
    assert plain(batch.take([5, 4])["number"]) == [5.0, 4.0]
    assert len(store.fetched) == 2
    batch.take(slice(0, 0))["ids"]
    assert len(store.fetched) <= 3


@pytest.mark.parametrize("order", ["in order", "shuffled", "reversed slice"])
def test_a_part_of_a_split_has_the_tables_that_hold_its_rows_and_no_others(order):
    """So a message to one of many ranks does not grow with the number of ranks."""
    sizes = [3, 0, 1, 4, 0, 0, 2, 5, 1, 0, 6]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    owners = [table for table, size in enumerate(sizes) for _ in range(size)]
    pieces = [promised(make(size, start)[0]) for size, start in zip(sizes, starts, strict=True)]
    tables = [piece.views[0].tables[0] for piece in pieces]
    batch = Batch.concat(pieces)
    numbers = list(range(sum(sizes)))
    if order == "shuffled":
        numbers = np.random.default_rng(0).permutation(numbers).tolist()
        batch = batch.take(numbers)
    if order == "reversed slice":
        numbers = numbers[18:2:-3]
        batch = batch.take(slice(18, 2, -3))
    parts = batch.split(4)
    assert [part.rows for part in parts] == [len(x) for x in np.array_split(numbers, 4)]
    at = 0
    for part in parts:
        wanted = numbers[at : at + part.rows]
        assert plain(part["number"]) == [float(number) for number in wanted]
        (view,) = part.views
        assert list(view.tables) == [tables[i] for i in sorted({owners[n] for n in wanted})]
        at += part.rows
    # A part without rows keeps one table, which knows the names.
    (empty,) = batch.take(slice(0, 0)).split(2)[1].views
    assert len(empty.tables) == 1


def test_sending_on_what_is_stored_moves_nothing(monkeypatch):
    batch, expected, store = stored(monkeypatch)
    there = sent([batch.take([4, 1]).rename(ids="tokens"), batch.join(batch)], store)
    assert store.fetched == [] and len(store.blocks) == 2 * 5
    assert plain(there[0]["tokens"]) == [expected[4]["ids"], expected[1]["ids"]]


def test_columns_that_nobody_knows_travel_untouched():
    odd = torch.randn(4, 2, dtype=torch.complex64)
    made = sent(
        promised(
            sent(Batch({"x": torch.zeros(4), "routed_experts": odd, "why": [None, (1,), {2}, "3"]}))
        )
    )
    made = Batch.concat(made.repeat(2).split(3)).take(slice(0, None, 2))
    assert torch.equal(made["routed_experts"].values, odd) and made["why"].values == [
        None,
        (1,),
        {2},
        "3",
    ]


def test_of_two_columns_with_one_name_the_one_joined_later_is_seen():
    a, b = Batch({"x": torch.zeros(2), "y": torch.zeros(2)}), Batch({"x": torch.ones(2)})
    assert plain(a.join(b)["x"]) == [1, 1] and plain(b.join(a)["x"]) == [0, 0]
    assert plain(a.join(promised(b, names=False))["x"]) == [1, 1]
    a["x"], b["x"]  # read before they are joined
    assert plain(a.join(b)["x"]) == [1, 1] and plain(a.join(b).select(["x", "y"])["y"]) == [0, 0]


def test_a_selection_of_a_pending_result_does_not_bring_its_other_columns():
    pending = promised(Batch({"x": torch.zeros(2), "y": torch.zeros(2)}), names=False)
    other = Batch({"y": torch.ones(2)})
    joined = other.join(pending.select(["x"]))
    assert plain(joined["y"]) == [1, 1] and sorted(joined.names) == ["x", "y"]
    assert plain(sent(joined)["y"]) == [1, 1]


def test_a_selection_of_nothing_keeps_the_number_of_rows():
    batch = make(3)[0]
    for kind in SOURCES:
        nothing = kind(batch).select([])
        assert nothing.rows == 3 and nothing.names == () and sent(nothing).rows == 3
        assert plain(nothing.with_columns(x=torch.arange(3))["x"]) == [0, 1, 2]


def test_columns_that_are_there_are_read_without_waiting_for_pending_ones():
    pending = Batch.of_views(
        [View((PromisedTable(lambda: pytest.fail("it was waited for"), None, None),))]
    )
    joined = pending.join(Batch({"x": torch.ones(2)}))
    assert joined.rows == 2 and plain(joined["x"]) == [1, 1] and joined.take([0]).rows == 1
    assert plain(Batch({"x": torch.ones(2)}).join(pending.select(["y"]))["x"]) == [1, 1]
    assert repr(joined) == "Batch(2 rows: ..., x)"


def test_units_stay_together_through_join_rename_and_select():
    batch = make(9)[0].whole(np.array([0, 1, 2] * 3))
    assert plain(batch["number"]) == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    for same in (
        batch,
        batch.rename(ids="x"),
        batch.select(["number"]),
        batch.with_columns(y=torch.zeros(9)),
    ):
        assert [p.rows for p in same.split(2)] == [6, 3]
        assert [p.rows for p in same.split(4)] == [3, 3, 3, 0]


def test_a_unit_number_for_each_row_is_needed():
    with pytest.raises(ValueError, match="each of the 3 rows, got 2"):
        make(3)[0].whole(np.array([0, 1]))


def test_metrics_come_with_a_batch_and_stay_with_it():
    batch = Batch({"x": torch.zeros(2)}, Metrics({"loss": (4.0, 2.0)}))
    for same in (
        sent(batch),
        promised(batch),
        sent(batch).rename(x="y"),
        batch.with_columns(y=torch.ones(2)),
    ):
        assert same.metrics["loss"] == 2.0
    both = Batch.concat([batch, Batch({"x": torch.zeros(1)}, Metrics({"loss": (5.0, 1.0)}))])
    assert both.metrics["loss"] == 3.0
    pending = promised(batch)
    assert Batch.concat(pending.take([1, 0]).split(2)).metrics.means["loss"][0] in (4.0, 8.0)


def test_a_result_that_breaks_its_promise_is_an_error_that_says_what_to_register():
    fewer = Batch.of_views([View((PromisedTable(lambda: make(2)[0], 3, None),))])
    with pytest.raises(HybridFlowError, match=r"returned 2 rows for 3; .*same_rows=False"):
        fewer["ids"]
    other = Batch.of_views([View((PromisedTable(lambda: make(2)[0], 2, ("ids", "scores")),))])
    with pytest.raises(HybridFlowError, match="promised: scores"):
        other["ids"]


def test_batches_of_different_row_counts_cannot_be_joined():
    with pytest.raises(ValueError, match=r"got \[2, 3\] rows"):
        make(2)[0].join(make(3)[0])
    late = make(2)[0].join(promised(Batch({"x": torch.zeros(3)}), rows=False))
    with pytest.raises(ValueError, match="column 'x' has 3 rows in a batch of 2"):
        late["x"]
    with pytest.raises(ValueError, match="one row count"):
        Batch({"x": torch.zeros(2), "y": torch.zeros(3)})


def test_batches_with_different_columns_cannot_follow_one_another():
    with pytest.raises(ValueError, match=r"not in all of them: \['y'\]"):
        Batch.concat(
            [Batch({"x": torch.zeros(1)}), Batch({"x": torch.zeros(1), "y": torch.zeros(1)})]
        )


def test_missing_columns_and_rows_are_named():
    batch = make(2)[0]
    with pytest.raises(KeyError, match="no column 'nope'; it has number, matrix"):
        batch["nope"]
    with pytest.raises(KeyError, match="no column 'nope'"):
        batch.rename(nope="x")
    with pytest.raises(KeyError, match="no column 'nope'"):
        promised(batch, names=False).select(["nope"])["nope"]
    with pytest.raises(ValueError, match="has a column 'ids' already"):
        batch.rename(number="ids")
    with pytest.raises(IndexError, match="row 2 of a batch of 2 rows"):
        batch.take([0, 2])
    with pytest.raises(IndexError, match="mask of 3 entries for a batch of 2 rows"):
        batch.take(np.array([True, False, True]))
    with pytest.raises(ValueError, match="at least one part"):
        batch.split(0)


def test_columns_may_change_places():
    batch = Batch({"a": torch.zeros(1), "b": torch.ones(1)}).rename(a="b", b="a")
    assert plain(batch["a"]) == [1] and plain(batch["b"]) == [0]


def test_an_empty_batch_is_a_batch():
    assert Batch().rows == 0 and Batch().names == () and Batch.concat([]).rows == 0
    assert [p.rows for p in make(0)[0].split(3)] == [0, 0, 0]
    assert Batch().join(make(2)[0]).rows == 2 and sent(Batch()).rows == 0
    assert rows_of(sent(make(0)[0])) == []
