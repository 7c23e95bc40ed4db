"""Small tensors written by hand, and what results must be close to."""

from __future__ import annotations

import math

import torch

LN2 = math.log(2.0)


def close(got, want, tolerance=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def t(*rows):
    """[B, T] of float32."""
    return torch.tensor(rows, dtype=torch.float32)


def log_ratios(*values):
    """(logprobs, old_logprobs) whose ratios are these."""
    return t(values).log(), torch.zeros(1, len(values))
