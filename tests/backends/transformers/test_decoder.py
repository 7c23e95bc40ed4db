"""The fast decoder alone: logits, rows that leave, and the memory of its cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.decoders import check_decoder, close, logits_of

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
