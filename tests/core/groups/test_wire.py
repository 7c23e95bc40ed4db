"""What is sent arrives as it was, small columns in the message and large ones beside it, and is nobody else's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from helpers.batches import CountingStore, plain, promised, rows_of, sent

from hybridflow.core.groups import wire
from hybridflow.core.groups.wire import INLINE_BYTES, OWN_OBJECT_BYTES, Encoder
from hybridflow.core.values.batch import Batch, PromisedTable, View
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics

DTYPES = list(wire._TORCH.values())


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("inline", [True, False], ids=["inside the message", "by handle"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype, inline, monkeypatch):
    monkeypatch.setattr(wire, "INLINE_BYTES", INLINE_BYTES if inline else 0)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (6, 4, dtype.itemsize), dtype=torch.uint8
    )
    x = raw.view(dtype).squeeze(-1)  # NaNs and infinities among them
    batch = Batch({"row": x, "ragged": Column(x, np.array([1, 0, 5]).repeat([1, 4, 1]))})
    arrived = sent(batch)
    for name in ("row", "ragged"):
        assert arrived[name].values.dtype == dtype and bits(arrived[name].values) == bits(x)
    for index in (slice(1, 6), np.array([5, 0, 5])):
        taken, expected = sent(arrived.take(index)), batch.take(index)
        assert bits(taken["row"].values) == bits(expected["row"].values)
        assert bits(taken["ragged"].values) == bits(expected["ragged"].values)


def test_tensors_that_are_views_or_need_gradients_arrive_as_values():
    x = torch.arange(12.0).view(3, 4)
    odd = Batch(
        {
            "t": x.t()[:3],
            "step": x[:, ::2],
            "grad": x.clone().requires_grad_(),
            "conj": torch.tensor([1j] * 3).conj(),
        }
    )
    arrived = sent(odd)
    assert torch.equal(arrived["t"].values, x.t()[:3]) and torch.equal(
        arrived["step"].values, x[:, ::2]
    )
    assert torch.equal(arrived["grad"].values, x) and not arrived["grad"].values.requires_grad
    assert arrived["conj"].values.tolist() == [-1j] * 3


def test_a_dtype_that_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="float8_e8m0fnu cannot be sent; known are float64"):
        sent(Batch({"x": torch.zeros(2, dtype=torch.float8_e8m0fnu)}))


def test_small_columns_travel_inside_and_large_ones_by_handle():
    store = CountingStore()
    small = Batch(
        {"x": torch.zeros(INLINE_BYTES // 4), "names": ["é", b"\0", None] * 341 + [{"k": (1,)}]}
    )
    assert small["x"].nbytes == INLINE_BYTES
    encoder = Encoder(store)
    encoder.dumps(small.select(["x"]))
    assert encoder.handles == [] and store.blocks == []
    blob = encoder.dumps(small)  # with the objects it is too much
    assert len(encoder.handles) == len(store.blocks) == 1 and len(blob) < 400
    rows = OWN_OBJECT_BYTES // 8
    large = Batch(
        {
            "a": torch.zeros(rows, 2),
            "b": torch.zeros(rows, 2),
            "c": torch.zeros(rows),
            "d": torch.ones(rows),
        }
    )
    encoder = Encoder(store := CountingStore())
    blob = encoder.dumps(large)
    assert sorted(len(block) for block in store.blocks) == [1, 1, 2]  # c and d share an object
    assert store.bytes_put == sum(large[n].nbytes for n in "abcd") and len(blob) < 500


def test_a_slice_of_a_local_batch_is_put_without_the_rest():
    store = CountingStore()
    x = torch.arange(1 << 20, dtype=torch.float32).view(64, -1)
    there = sent(Batch({"x": x}).split(4)[2], store)
    assert store.bytes_put == x.nbytes // 4
    assert torch.equal(there["x"].values, x[32:48])
    sent(
        Batch.concat([Batch({"x": x, "y": x}), Batch({"x": x, "y": x})])
        .select(["x"])
        .take(slice(60, 68)),
        store,
    )
    assert store.bytes_put == x.nbytes // 4 + 8 * x[0].nbytes


def test_repeated_rows_are_one_entry_a_run():
    stored = sent(Batch({"x": torch.arange(100_000)}))
    plainly = len(Encoder(CountingStore()).dumps(stored))
    assert len(Encoder(CountingStore()).dumps(stored.repeat(64))) <= plainly + 4 * 100_000 + 50
    few = sent(Batch({"x": torch.arange(8)}))
    assert (
        len(Encoder(CountingStore()).dumps(few.repeat(1000)))
        < len(Encoder(CountingStore()).dumps(few)) + 50
    )
    assert len(Encoder(CountingStore()).dumps(stored.take(slice(10, 90_000)))) < plainly + 50
    assert sent(few.repeat(3).take(slice(2, 7)))["x"].values.tolist() == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "rows", [[0, 0, 1], [0, 0, 1, 1, 2], [5, 5, 5], [3], [], [0, 0, 1, 2, 2, 1, 1, 0]]
)
def test_an_index_arrives_as_it_was(rows):
    index = np.array(rows, dtype=np.int64)
    assert wire._decode_index(wire._encode_index(index)).tolist() == rows


def test_only_the_columns_that_are_seen_are_sent():
    store = CountingStore()
    stored = sent(
        Batch({"a": torch.zeros(8, 5000), "b": torch.zeros(8, 1 << 18), "c": torch.zeros(8)}), store
    )
    assert len(store.blocks) == 2
    encoder = Encoder(store)
    encoder.dumps(stored.select(["b"]))
    assert len(encoder.handles) == 1
    inside = sent(Batch({"d": torch.zeros(8, 100), "e": torch.zeros(8)}), store)
    assert len(Encoder(store).dumps(inside.select(["e"]))) < 300
    behind = Batch.concat([inside.join(stored)] * 2)
    encoder = Encoder(store)
    assert (
        len(encoder.dumps(behind.select(["e", "c"]).take([0, 15]))) < 600
        and len(encoder.handles) == 1
    )
    assert rows_of(sent(behind.select(["e", "c"]).take([15]), store)) == [{"e": 0.0, "c": 0.0}]


@pytest.mark.parametrize("inline", [True, False], ids=["inside the message", "by handle"])
def test_writing_to_what_was_read_changes_nobody_elses_data(inline, monkeypatch):
    monkeypatch.setattr(wire, "INLINE_BYTES", INLINE_BYTES if inline else 0)
    x, ids = torch.arange(6.0), tokens([[1, 2], [], [3], [4], [5], [6]])
    kept = x.clone()
    mine = Batch({"x": x, "ids": ids, "meta": [[i] for i in range(6)]})
    there, also_there = sent([mine, promised(mine)])
    x.add_(100)  # the sender goes on working
    assert torch.equal(there["x"].values, kept)
    for index in (slice(None), slice(1, 4), [0, 2], [5, 5]):
        part = there.take(index)
        part["x"].values.add_(1)
        part["ids"].values.zero_()
        part["meta"].values[0].append("mine")
    there["x"].values.mul_(-1)
    fresh = there.take(slice(None))
    assert torch.equal(fresh["x"].values, kept) and plain(fresh["ids"]) == [
        [1, 2],
        [],
        [3],
        [4],
        [5],
        [6],
    ]
    assert fresh["meta"].values == [[i] for i in range(6)]
    assert plain(also_there["x"])[1] == 1.0


def test_a_pending_result_is_sent_as_a_reference_once():
    reply, batch = object(), Batch({"x": torch.arange(4)})
    table = PromisedTable(lambda: pytest.fail("it was waited for"), 4, None, reply)
    pending = Batch.of_views([View((table,))])
    encoder = Encoder(CountingStore())
    encoder.dumps([pending, pending.take([3, 0]), pending.select(["x"]).split(2)])
    assert encoder.replies == [reply]
    store = CountingStore()
    encoder = Encoder(store)
    blob = encoder.dumps(pending.take([3, 0]))
    there = wire.Decoder(blob, [], store, lambda at: batch).load()
    assert there.rows == 2 and plain(there["x"]) == [3, 0]


def test_row_counts_that_are_not_known_yet_do_not_delay_sending():
    def table(reply):
        return PromisedTable(lambda: pytest.fail("it was waited for"), None, None, reply)

    both = Batch.of_views([View((table("first"), table("second")))]).join(
        Batch({"n": torch.arange(6)})
    )
    encoder = Encoder(CountingStore())
    blob = encoder.dumps(both.split(2)[1])
    parts = {0: Batch({"x": torch.arange(4)}), 1: Batch({"x": torch.arange(4, 6)})}
    there = wire.Decoder(blob, [], CountingStore(), parts.__getitem__).load()
    assert encoder.replies == ["first", "second"] and plain(there["x"]) == [3, 4, 5]


@attrs.frozen
class Settings:
    rate: float


Pair = namedtuple("Pair", "batch weight")


def test_batches_are_found_anywhere_inside_a_value():
    value = {
        "pairs": [Pair(Batch({"x": torch.ones(2)}), 0.5)],
        "settings": Settings(0.1),
        "f": lambda x: x + 1,
    }
    there = sent((value, Metrics({"m": (1.0, 2.0)})))
    assert plain(there[0]["pairs"][0].batch["x"]) == [1, 1] and there[0]["pairs"][0].weight == 0.5
    assert there[0]["settings"].rate == 0.1 and there[0]["f"](1) == 2 and there[1]["m"] == 0.5


def test_what_cannot_be_pickled_is_an_error_for_the_sender():
    with pytest.raises(TypeError, match="pickle"):
        sent([threading.Lock()])


STRANGER = """
import pickle, sys
from hybridflow.core.groups.wire import Decoder
cls, function, number = Decoder(sys.stdin.buffer.read(), [], None).load()
assert cls(3).rate == 3 and function(2) == 4 and number == 7, (cls, function)
print("understood")
"""


def test_classes_and_functions_of_a_module_that_others_cannot_import_travel_by_value(
    tmp_path, monkeypatch
):
    (tmp_path / "only_here.py").write_text(
        "import attrs\n@attrs.frozen\nclass Here:\n    rate: float\n"
        "def double(x):\n    return helper(x) * 1\ndef helper(x):\n    return x * 2\n"
    )
    spec = importlib.util.spec_from_file_location("strange_name", tmp_path / "only_here.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "strange_name", module)
    spec.loader.exec_module(module)
    blob = Encoder(CountingStore()).dumps((module.Here, module.double, 7))
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # as a worker has it
    made = subprocess.run(
        [sys.executable, "-c", STRANGER], input=blob, capture_output=True, cwd=tmp_path, env=path
    )
    assert made.stdout.decode().strip() == "understood", made.stderr.decode()


def test_what_others_can_import_travels_by_name():
    blob = Encoder(CountingStore()).dumps((Batch, np.mean, attrs.evolve))
    assert len(blob) < 200


def test_what_is_passed_on_again_and_again_does_not_grow():
    store = CountingStore()
    one = Batch({"x": torch.arange(6), "y": torch.arange(6) * 2})
    few = Batch.concat(
        [sent(one, store).take([0, 1]), sent(one, store).join(sent(one, store)).take([2, 3])]
    )
    sizes = []
    for hop in range(40):
        one, few = promised(sent(one, store)), promised(sent(few, store), names=hop % 2 == 0)
        if hop % 3 == 0:
            one = one.rename(x="y", y="x").take([5, 0, 1, 2, 3, 4])
            few = Batch.concat(few.take([3, 2, 1, 0]).split(2))
        sizes.append((len(Encoder(store).dumps(one)), len(Encoder(store).dumps(few))))
    assert sizes[-1][0] <= sizes[0][0] + 50
    assert max(few for _, few in sizes[20:]) <= max(few for _, few in sizes[:20])
    assert plain(one["x"]) == [4, 5, 0, 1, 2, 3] and plain(one["y"]) == [8, 10, 0, 2, 4, 6]
    assert plain(few["x"]) == [0, 1, 2, 3]
