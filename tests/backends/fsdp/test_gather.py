"""Whole parameters from the pieces of two ranks."""

from __future__ import annotations

import pytest
import torch
from helpers.reshard_jobs import gathered

from hybridflow.core.values.weights import Box


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20], ids=["one by one", "some", "all"])
def test_every_rank_has_every_parameter_in_order_however_it_was_cut(ranks, bucket_bytes):
    numbers = torch.arange(64.0)
    matrix, wide = numbers[:15].view(5, 3), numbers[15:39].view(4, 6)
    everywhere, last = numbers[39:42], numbers[42:50].view(2, 4)
    parameters = {
        "rows": (matrix, {0: Box((0, 0), (3, 3)), 1: Box((3, 0), (5, 3))}),
        "columns": (wide, {0: Box((0, 0), (4, 1)), 1: Box((0, 1), (4, 6))}),
        "everywhere": (everywhere, {0: Box((0,), (3,)), 1: Box((0,), (3,))}),
        "narrow": (numbers[50:54].bfloat16(), {0: Box((0,), (2,)), 1: Box((2,), (4,))}),
        "of the last rank": (last, {0: Box((0, 0), (0, 4)), 1: Box((0, 0), (2, 4))}),
    }
    for found in ranks(gathered, 2, parameters, bucket_bytes):
        assert [name for name, _ in found] == list(parameters)
        for name, whole in found:
            assert whole.dtype == parameters[name][0].dtype
            assert torch.equal(whole, parameters[name][0]), name
