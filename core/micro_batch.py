"""Rows into micro-batches: like lengths together, within a token budget, units whole, the same number on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridflow.core.columns import Column
from hybridflow.core.training import MicroBatch

OVERHEAD_TOKENS = 256
"""What one more forward and backward costs, in tokens' worth of time: padding below it is cheaper than a split."""
LONGEST_SEARCH = 512
"""Units that the search for the best cut looks back over, at most."""


def plan_micro_batches(
    lengths: np.ndarray, budget: int, units: np.ndarray | None = None, overhead: int = OVERHEAD_TOKENS
) -> list[np.ndarray]:
    """Row indices per micro-batch, such that rows * longest <= `budget` (a single unit may exceed it).

    Units (equal values in `units`) stay whole. Sorted by length; the cuts minimise padded tokens plus `overhead` per
    micro-batch, by dynamic programming over the sorted units. Deterministic.
    """
    if len(lengths) == 0:
        return []
    members = _unit_rows(len(lengths), units)
    longest = np.array([lengths[m].max() for m in members])
    sizes = np.array([len(m) for m in members])
    order = np.argsort(longest, kind="stable")
    longest, sizes = longest[order], sizes[order]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    best = np.full(len(order) + 1, np.inf)
    best[0], cut = 0.0, np.zeros(len(order) + 1, dtype=np.int64)
    for stop in range(1, len(order) + 1):
        starts = np.arange(max(0, stop - LONGEST_SEARCH), stop)
        tokens = (ends[stop] - ends[starts]) * longest[stop - 1]
        allowed = (tokens <= budget) | (starts == stop - 1)
        cost = np.where(allowed, best[starts] + tokens + overhead, np.inf)
        at = int(np.argmin(cost))
        best[stop], cut[stop] = cost[at], starts[at]
    out, stop = [], len(order)
    while stop:
        start = int(cut[stop])
        out.append(np.concatenate([members[i] for i in order[start:stop]]))
        stop = start
    return out[::-1]


def _unit_rows(rows: int, units: np.ndarray | None) -> list[np.ndarray]:
    if units is None:
        return list(np.arange(rows)[:, None])
    order = np.argsort(units, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(units[order])) + 1)


def make_micro_batch(
    prompts: Column, responses: Column, rows: np.ndarray, device: torch.device, topk_ids: Column | None = None
) -> MicroBatch:
    """The MicroBatch of some rows."""
    prompt, response = prompts.take(rows), responses.take(rows)
    assert prompt.lengths is not None and response.lengths is not None
    total = prompt.lengths + response.lengths
    ids = torch.zeros(len(rows), int(total.max()), dtype=torch.int64)
    at = torch.arange(ids.shape[1])[None]
    head = torch.from_numpy(prompt.lengths)[:, None]
    ids[at < head] = torch.as_tensor(prompt.values).long()
    ids[(at >= head) & (at < torch.from_numpy(total)[:, None])] = torch.as_tensor(response.values).long()
    return MicroBatch(
        ids.to(device),
        torch.from_numpy(prompt.lengths).to(device),
        torch.from_numpy(response.lengths).to(device),
        None if topk_ids is None else topk_ids.take(rows).padded().long().to(device),
    )


def dummy_micro_batch(device: torch.device, topk: int = 0) -> MicroBatch:
    """One row of one prompt and one response token, whose loss is multiplied by 0."""
    one = torch.ones(1, dtype=torch.int64, device=device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    extra = torch.zeros(1, 1, topk, dtype=torch.int64, device=device) if topk else None
    return MicroBatch(ids, one, one, extra, dummy=True)


def unpad(outputs: Sequence[torch.Tensor], plan: Sequence[np.ndarray], lengths: np.ndarray) -> Column:
    """Per-token outputs [B, T, ...] of the micro-batches -> one token column in the rows' own order."""
    pieces = [Column.from_padded(o.detach().cpu(), lengths[rows]) for o, rows in zip(outputs, plan, strict=True)]
    back = np.argsort(np.concatenate(list(plan)), kind="stable")
    return Column.concat(pieces).take(back)
