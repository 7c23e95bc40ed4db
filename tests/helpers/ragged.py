"""Random tensors of one ragged batch with holes, and float64 numpy, looping straight from the formulas."""

from __future__ import annotations

import math

import numpy as np
import torch

SEEDS = range(25)


class Random:
    """Random tensors of one ragged batch: rows of any length, 0 included, with holes."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.rows, self.tokens = self.rng.integers(1, 8), self.rng.integers(1, 12)
        lengths = self.rng.integers(0, self.tokens + 1, self.rows)
        self.mask = (np.arange(self.tokens) < lengths[:, None]) & (
            self.rng.random((self.rows, self.tokens)) < 0.75
        )
        self.group = self.rng.integers(0, 3, self.rows) * 1000 - 7

    def token(self, scale=1.0):
        return self.rng.normal(0, scale, (self.rows, self.tokens))

    def row(self):
        return self.rng.normal(0, 2, self.rows)


def same(got, want):
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-6, atol=1e-6)


def run(function, *arrays_and_numbers, **kwargs):
    """`function` in float64 on numpy arrays."""
    return function(
        *(torch.tensor(x) if isinstance(x, np.ndarray) else x for x in arrays_and_numbers), **kwargs
    )


def clip(x, low, high):
    return min(max(x, low), high)


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def per_token(function, *arrays):
    return np.array(
        [[function(*xs) for xs in zip(*rows, strict=True)] for rows in zip(*arrays, strict=True)]
    )


def ref_mean(x, mask):
    kept = [x[i, j] for i, j in np.ndindex(*x.shape) if mask[i, j]]
    return sum(kept) / len(kept) if kept else 0.0


def smooth_batch(seed=0, rows=3, tokens=4):
    """Log ratios whose surrogates are away from the kinks at 0.8, 1.3 and the dual clip by more than the step."""
    rng = np.random.default_rng(seed)
    ratios = rng.choice([0.5, 0.7, 0.9, 1.1, 1.2, 1.6, 3.5], (rows, tokens))
    old = torch.tensor(rng.normal(-2, 1, (rows, tokens)))
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    advantages = torch.tensor(rng.choice([-2.0, -0.5, 0.7, 1.5], (rows, tokens)))
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    return logprobs, old, advantages, mask
