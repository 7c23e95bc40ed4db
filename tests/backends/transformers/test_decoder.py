"""The fast decoder alone: logits, rows that leave, and the memory of its cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.decoders import append, check_decoder, close, logits_of

from hybridflow.backends.transformers import decoder as module
from hybridflow.backends.transformers.decoder import cut, fill_holes
from hybridflow.kit import onednn


@pytest.mark.parametrize(
    ("model_type", "hf"),
    [("llama", {}), ("qwen3", {"head_dim": 24}), ("mistral", {"sliding_window": None})],
)
def test_logits_are_those_of_hugging_face_while_lanes_grow_and_rows_leave(tiny, model_type, hf):
    case = tiny(model_type, hf=hf)
    check_decoder(case.engine.decoder, case.model, steps=70)  # lanes grow by 32 columns at least


def test_rows_that_are_admitted_later_stand_behind_the_live_ones(tiny):
    case = tiny("llama")
    decoder = case.engine.decoder
    decoder.free()
    decoder.reserve(3, 20)
    decoder.admit([np.array([7, 8, 9])], [1])
    decoder.step(torch.tensor([1]))
    close(decoder.admit([np.array([5])], [2]), logits_of(case.model, [[5], [5]]))
    logits = decoder.step(torch.tensor([2, 3, 4]))
    close(logits, logits_of(case.model, [[7, 8, 9, 1, 2], [5, 3], [5, 4]]))


def test_the_cache_has_room_for_whole_lanes_of_64_and_is_kept_while_it_is_large_enough(tiny):
    decoder = tiny("qwen2").engine.decoder
    # keys and values of 2 layers, 2 heads and 64 or 128 columns of 16 floats
    assert decoder.row_bytes(1) == decoder.row_bytes(64) == 2 * 2 * 2 * 64 * 16 * 4
    assert decoder.row_bytes(65) == 2 * 2 * 2 * 128 * 16 * 4
    decoder.free()
    decoder.reserve(4, 65)
    assert decoder.cache.nbytes == 4 * decoder.row_bytes(65)
    cache = decoder.cache
    decoder.reserve(3, 128)
    assert decoder.cache is cache
    decoder.reserve(5, 65)
    assert decoder.cache.nbytes == 5 * decoder.row_bytes(65)
    decoder.free()
    assert decoder.cache is None
    assert decoder.longest == 0


def test_logits_by_onednn_are_those_of_hugging_face(tiny, monkeypatch):
    case = tiny("qwen2")  # with biases
    calls = []
    product = onednn.linear
    monkeypatch.setattr(case.engine.decoder, "_onednn", True)
    monkeypatch.setattr(onednn, "LEAST_ROWS", 1)
    monkeypatch.setattr(onednn, "linear", lambda *args: calls.append(args) or product(*args))
    check_decoder(case.engine.decoder, case.model, steps=3)
    # Of a prefill and 3 steps: 4 products in each of 2 layers, and the head.
    assert len(calls) >= 4 * (4 * 2 + 1)


def test_live_rows_stay_while_the_cache_is_laid_out_anew_in_place_or_elsewhere(tiny):
    case = tiny("llama")
    decoder = case.engine.decoder
    decoder.free()
    decoder.reserve(2, 150)
    decoder.admit([np.array([7, 8, 9]), np.array([5])], [1, 1])
    rows = [[7, 8, 9], [5]]
    draw = np.random.default_rng(0)
    for _ in range(40):
        append(decoder, rows, draw)
    first = decoder.cache
    decoder.reserve(6, 64)  # 6 lanes of 64 columns lie in the memory of 2 lanes of 192
    assert decoder.cache is first
    decoder.admit([np.array([1, 2])], [4])
    rows += [[1, 2] for _ in range(4)]
    for _ in range(10):
        logits = append(decoder, rows, draw)
    close(logits, logits_of(case.model, rows))
    decoder.reserve(6, 200)
    assert decoder.cache is not first
    for _ in range(20):
        logits = append(decoder, rows, draw)
    close(logits, logits_of(case.model, rows))


def test_parts_of_like_lengths_attend_apart_and_give_the_same_logits(tiny, monkeypatch):
    monkeypatch.setattr(module, "CUT_ON_CPU", 2 * 16 * 21)  # 2 heads of 16: 21 columns
    case = tiny("qwen3", hf={"head_dim": 16})
    decoder = case.engine.decoder
    decoder.free()
    decoder.reserve(5, 100)
    rows = [[(3 * i) % 48 for i in range(size)] for size in (60, 55, 30, 8, 4)]
    decoder.admit([np.array(row) for row in rows], [1] * 5)
    draw = np.random.default_rng(0)
    parts = []
    attend = decoder._attend
    monkeypatch.setattr(
        decoder, "_attend", lambda *args: parts.append(args[-1]) or attend(*args), raising=True
    )
    for _ in range(3):
        logits = append(decoder, rows, draw)
    close(logits, logits_of(case.model, rows))
    # lanes, two a row, and columns with the new token: cuts that spare 3 x 30 and 2 x 22 columns pay,
    # those that spare 4 x 5 and 1 x 4 do not
    assert [part[:3] for part in parts[0]] == [(0, 4, 61), (4, 2, 31), (6, 4, 9)]


def test_a_cut_spares_the_rows_behind_it_at_least_so_many_columns():
    assert cut(np.array([10, 10, 10]), 1) == [(0, 3)]
    assert cut(np.array([10, 2, 2]), 16) == [(0, 1), (1, 3)]
    assert cut(np.array([10, 2, 2]), 17) == [(0, 3)]
    assert cut(np.array([2, 2, 10]), 1) == [(0, 3)]  # what the last row needs, those before pay for
    assert cut(np.array([9, 3, 9, 1, 1, 1]), 10) == [(0, 3), (3, 6)]
    assert cut(np.array([], np.int64), 1) == []


def test_rows_from_the_end_fill_holes_unless_their_order_costs_too_much(tiny, monkeypatch):
    assert fill_holes(np.array([1, 0, 1, 0, 1], bool)).tolist() == [0, 4, 2]
    monkeypatch.setattr(module, "CUT_ON_CPU", 2 * 16)
    decoder = tiny("qwen2").engine.decoder
    decoder.free()
    decoder.lengths = np.array([50, 50, 50, 20, 5, 5])
    alive = np.array([1, 0, 1, 1, 1, 1], bool)
    # Holes filled: 50 5 50 20 5 attend to 3 x 50 + 20 + 5 = 175; sorted: 2 x 50 + 20 + 2 x 5 = 130.
    assert decoder.order(alive).tolist() == [0, 2, 3, 5, 4]
    # Holes filled: 50 43 44 attend to 50 + 2 x 44 = 138, hardly more than the sorted 137.
    decoder.lengths = np.array([50, 48, 44, 43])
    assert decoder.order(np.array([1, 0, 1, 1], bool)).tolist() == [0, 3, 2]
    decoder.free()
