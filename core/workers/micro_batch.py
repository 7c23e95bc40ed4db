"""Rows into micro-batches: like lengths together, within a token budget, units whole, the same number on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hybridflow.core.contracts.training import MicroBatch
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.columns import Column

OVERHEAD_TOKENS = 256
"""What one more forward and backward costs, in tokens' worth of time: padding below it is cheaper than a split."""
LONGEST_SEARCH = 512
"""Distinct lengths that a micro-batch may span at most, which bounds the search for the cuts."""


def plan_micro_batches(
    lengths: np.ndarray,
    budget: int,
    units: np.ndarray | None = None,
    overhead: int = OVERHEAD_TOKENS,
) -> list[np.ndarray]:
    """Row indices per micro-batch, such that rows * longest <= `budget` (a single unit may exceed it).

    Units (equal values in `units`) stay whole. Sorted by length, then by rows; the cuts minimise padded tokens plus
    `overhead` per micro-batch. Deterministic.
    """
    if len(lengths) == 0:
        return []
    members = _unit_rows(len(lengths), units)
    longest = (
        np.asarray(lengths) if units is None else np.array([lengths[m].max() for m in members])
    )
    sizes = (
        np.ones(len(longest), np.int64) if units is None else np.array([len(m) for m in members])
    )
    order = np.lexsort((sizes, longest))
    stops = _cuts(longest[order], np.concatenate([[0], np.cumsum(sizes[order])]), budget, overhead)
    if units is None:
        return np.split(order, stops[:-1])
    return [np.concatenate([members[i] for i in part]) for part in np.split(order, stops[:-1])]


def _cuts(longest: np.ndarray, ends: np.ndarray, budget: int, overhead: int) -> list[int]:
    """Where micro-batches of the sorted units stop. longest: [n] ascending; ends: [n + 1], rows before each unit.

    Shortest path over cuts. Of units of one length, only those cuts matter that lie behind the last of them or where
    the budget is full: moving any other cut to the right replaces tokens of the longer micro-batch by fewer.
    """
    count = len(longest)
    if ends[-1] * longest[-1] <= budget and (longest[-1] - longest) @ np.diff(ends) <= overhead:
        return [count]  # a split cannot save what it costs
    run_stops = np.append(np.flatnonzero(np.diff(longest)) + 1, count)
    run_starts = np.append(0, run_stops[:-1])
    best, before = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
    best[0] = 0.0
    for start in range(count):
        if best[start] == np.inf:
            continue
        first = int(np.searchsorted(run_stops, start, "right"))
        runs = slice(first, first + LONGEST_SEARCH)
        full = (
            np.searchsorted(ends, ends[start] + budget // longest[run_stops[runs] - 1], "right") - 1
        )
        stops = np.minimum(full, run_stops[runs])  # as many units of each length as fit
        stops = stops[stops > np.maximum(start, run_starts[runs])]
        stops = stops if len(stops) else np.array([start + 1])
        cost = best[start] + (ends[stops] - ends[start]) * longest[stops - 1] + overhead
        better = cost < best[stops]
        best[stops[better]], before[stops[better]] = cost[better], start
    out = [count]
    while before[out[-1]]:
        out.append(int(before[out[-1]]))
    return out[::-1]


def _unit_rows(rows: int, units: np.ndarray | None) -> list[np.ndarray]:
    if units is None:
        return []
    order = np.argsort(units, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(units[order])) + 1)


def make_micro_batch(
    prompts: Column, responses: Column, rows: np.ndarray, device: torch.device, topk_ids: Column | None = None,
    extras: Mapping[str, Column] | None = None,
) -> MicroBatch:  # fmt: skip
    """The MicroBatch of some rows. Raises HybridFlowError when a prompt is empty: nothing predicts its first token."""
    prompt, response = prompts.take(rows), responses.take(rows)
    assert prompt.lengths is not None and response.lengths is not None
    if not prompt.lengths.all():
        raise HybridFlowError(
            f"row {rows[np.argmin(prompt.lengths)]} has an empty prompt; begin prompts with a token (bos, say)"
        )
    head, total = (
        torch.from_numpy(prompt.lengths)[:, None],
        torch.from_numpy(prompt.lengths + response.lengths),
    )
    ids = torch.zeros(len(rows), int(total.max()), dtype=torch.int64)
    at = torch.arange(ids.shape[1])[None]
    in_prompt = at < head
    ids[in_prompt] = torch.as_tensor(prompt.values).long()
    ids[(at < total[:, None]) & ~in_prompt] = torch.as_tensor(response.values).long()
    return MicroBatch(
        ids.to(device, non_blocking=True),
        torch.from_numpy(prompt.lengths),
        torch.from_numpy(response.lengths),
        None if topk_ids is None else topk_ids.take(rows).padded().long().to(device),
        extras={name: column.take(rows) for name, column in (extras or {}).items()},
    )


def dummy_micro_batch(device: torch.device, topk: int = 0) -> MicroBatch:
    """One row of one prompt and one response token, whose loss is multiplied by 0."""
    one = torch.ones(1, dtype=torch.int64)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    extra = torch.zeros(1, 1, topk, dtype=torch.int64, device=device) if topk else None
    return MicroBatch(ids, one, one, extra, dummy=True)


def unpad(
    outputs: Sequence[torch.Tensor], plan: Sequence[np.ndarray], lengths: np.ndarray
) -> Column:
    """Per-token outputs [B, T, ...] of the micro-batches -> one token column in the rows' own order."""
    pieces = [
        Column.from_padded(o.detach().cpu(), lengths[rows])
        for o, rows in zip(outputs, plan, strict=True)
    ]
    back = np.argsort(np.concatenate(list(plan)), kind="stable")
    return Column.concat(pieces).take(back)
