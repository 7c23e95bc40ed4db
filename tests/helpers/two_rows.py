"""Two responses with round log ratios, one of them with a tool's token inside: advantages can be computed by hand."""

from __future__ import annotations

import torch

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
OLD = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -9.0, -3.0]])
REF = torch.tensor([[-1.5, -1.0, 0.0], [-2.0, -1.0, -2.0]])
"""k1 per token: 0.5, -1 and 1, (hole), -1: sums -0.5 and 0."""


def scored(algorithm, scores, group=(0, 0), **columns):
    """What the algorithm's `advantages` gives for these scores; group None: it has none."""
    if group is not None:
        columns["group"] = torch.tensor(group)
    given = {"loss_mask": MASK, "old_logprobs": OLD, "ref_logprobs": REF, **columns}
    return algorithm.advantages(scores=torch.tensor(scores), **given)


def close(found: torch.Tensor, want) -> None:
    torch.testing.assert_close(found, torch.tensor(want), atol=1e-5, rtol=1e-5)
