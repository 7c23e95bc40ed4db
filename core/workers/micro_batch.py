"""Splits rows into micro-batches within a token budget, by similar length and with whole units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hybridflow.core.contracts.training import MicroBatch, Packing, counted
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.columns import Column

OVERHEAD_TOKENS = 256
"""The cost of one more forward and backward pass, as the number of tokens that take as long.

Less padding than that is cheaper than a split.
"""
LONGEST_SEARCH = 512
"""The most distinct lengths that a micro-batch may span, which bounds the search for the cuts."""


def plan_micro_batches(
    lengths: np.ndarray,
    budget: int,
    units: np.ndarray | None = None,
    overhead: int = OVERHEAD_TOKENS,
    packing: Packing = Packing.PADDED,
    prompts: Column | None = None,
) -> list[np.ndarray]:
    """Return the row indices of micro-batches of at most `budget` tokens each.

    Padded rows count rows * longest, packed ones their sum. A single unit may exceed the budget.
    Units (rows with equal values in `units`) stay whole. They
    are sorted by length, then by their number of rows; the cuts minimise padded tokens plus
    `overhead` per micro-batch. Packed rows have no padding: each micro-batch is filled. Rows that
    share one of `prompts` stay together as far as the budget allows. Deterministic.
    """
    if len(lengths) == 0:
        return []
    if packing is not Packing.PADDED:
        shares = prompts if packing is Packing.SHARED else None
        return _plan_packed(np.asarray(lengths), budget, units, shares)

    # For each unit its longest row and its number of rows; without units each row is a unit.
    members = _unit_rows(len(lengths), units)
    if units is None:
        longest = np.asarray(lengths)
        sizes = np.ones(len(longest), np.int64)
    else:
        longest = np.array([lengths[rows].max() for rows in members])
        sizes = np.array([len(rows) for rows in members])

    # `ends`: the number of rows before each of the sorted units, then the number of all rows.
    order = np.lexsort((sizes, longest))
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    stops = _cuts(longest[order], ends, budget, overhead)
    parts = np.split(order, stops[:-1])
    if units is None:
        return parts
    return [np.concatenate([members[unit] for unit in part]) for part in parts]


def _plan_packed(
    lengths: np.ndarray,
    budget: int,
    units: np.ndarray | None,
    prompts: Column | None,
) -> list[np.ndarray]:
    """Return the rows of each micro-batch, filled with units, or with rows that share a prompt.

    prompts: those of the rows; None: each row has its own.
    """
    if prompts is None and units is None:
        order = np.argsort(lengths, kind="stable")
        return np.split(order, _filled(lengths[order], budget)[:-1])

    owners = np.arange(len(lengths)) if prompts is None else _owners(prompts)
    prompt_lengths = lengths if prompts is None else np.asarray(prompts.lengths)
    if units is not None:
        pieces = _unit_rows(len(lengths), units)
    else:
        pieces = []
        for rows in _unit_rows(len(lengths), owners):
            # Each piece of a large group has the prompt.
            prompt = prompt_lengths[rows[0]]
            stops = _filled(lengths[rows] - prompt, max(budget - prompt, 1))
            pieces += np.split(rows, stops[:-1])

    # A prompt counts once in a piece.
    tokens = np.array([lengths[rows].sum() for rows in pieces])
    for number, rows in enumerate(pieces):
        firsts = np.unique(owners[rows], return_index=True)[1]
        repeated = np.delete(rows, firsts)
        tokens[number] -= prompt_lengths[repeated].sum()
    longest = np.array([lengths[rows].max() for rows in pieces])
    order = np.lexsort((tokens, longest))
    parts = np.split(order, _filled(tokens[order], budget)[:-1])
    return [np.concatenate([pieces[number] for number in part]) for part in parts]


def _filled(tokens: np.ndarray, budget: int) -> list[int]:
    """Return where to cut the sorted pieces into micro-batches that are as full as possible.

    tokens: [n], the tokens of each piece.
    """
    ends = np.cumsum(tokens)
    stops = [0]
    while stops[-1] < len(tokens):
        start = stops[-1]
        before = ends[start - 1] if start else 0
        full = int(np.searchsorted(ends, before + budget, "right"))
        stops.append(max(full, start + 1))
    return stops[1:]


def _owners(prompts: Column) -> np.ndarray:
    """Return for each row the first row that has the same prompt, int64 [rows]."""
    assert prompts.lengths is not None
    values = np.asarray(torch.as_tensor(prompts.values))
    stops = np.cumsum(prompts.lengths)
    first: dict[bytes, int] = {}
    owners = [
        first.setdefault(values[start:stop].tobytes(), row)
        for row, (start, stop) in enumerate(zip(stops - prompts.lengths, stops, strict=True))
    ]
    return np.array(owners, np.int64)


def _cuts(longest: np.ndarray, ends: np.ndarray, budget: int, overhead: int) -> list[int]:
    """Return where to cut the sorted units into micro-batches.

    longest: [n] ascending; ends: [n + 1], the rows before each unit. The cuts are a shortest path:
    an edge from `start` to `stop` is a micro-batch, and costs its padded tokens plus `overhead`:

        cost(start, stop) = (ends[stop] - ends[start]) * longest[stop - 1] + overhead.

    Within a run of units of equal length only two kinds of cut matter: after its last unit, and
    where the budget is full. Any other cut can move to the right, which takes rows out of a longer
    micro-batch at no cost.
    """
    count = len(longest)
    padding = (longest[-1] - longest) @ np.diff(ends)
    if ends[-1] * longest[-1] <= budget and padding <= overhead:
        return [count]  # a split cannot save what it costs

    # Units of one length form a run.
    run_stops = np.append(np.flatnonzero(np.diff(longest)) + 1, count)
    run_starts = np.append(0, run_stops[:-1])
    best = np.full(count + 1, np.inf)
    before = np.zeros(count + 1, dtype=np.int64)
    best[0] = 0.0
    for start in range(count):
        if best[start] == np.inf:
            continue

        # As many units of each length as fit, or at least one unit.
        first = int(np.searchsorted(run_stops, start, "right"))
        runs = slice(first, first + LONGEST_SEARCH)
        last_row = ends[start] + budget // longest[run_stops[runs] - 1]
        full = np.searchsorted(ends, last_row, "right") - 1
        stops = np.minimum(full, run_stops[runs])
        stops = stops[stops > np.maximum(start, run_starts[runs])]
        stops = stops if len(stops) else np.array([start + 1])

        # Paths that are cheaper through `start`.
        cost = best[start] + (ends[stops] - ends[start]) * longest[stops - 1] + overhead
        better = cost < best[stops]
        best[stops[better]] = cost[better]
        before[stops[better]] = start

    # The path, from its end.
    path = [count]
    while before[path[-1]]:
        path.append(int(before[path[-1]]))
    return path[::-1]


def _unit_rows(rows: int, units: np.ndarray | None) -> list[np.ndarray]:
    """Return the row indices of each unit, by the units' values."""
    if units is None:
        return []
    order = np.argsort(units, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(units[order])) + 1)


def make_micro_batch(
    prompts: Column,
    responses: Column,
    rows: np.ndarray,
    device: torch.device,
    topk_ids: Column | None = None,
    extras: Mapping[str, Column] | None = None,
    packing: Packing = Packing.PADDED,
) -> MicroBatch:
    """Return the MicroBatch of some rows: the prompt and then the response of each.

    Raises HybridFlowError when a prompt is empty: nothing predicts the first token of its response.
    """
    prompt = prompts.take(rows)
    response = responses.take(rows)
    assert prompt.lengths is not None and response.lengths is not None
    if not prompt.lengths.all():
        raise HybridFlowError(
            f"row {rows[np.argmin(prompt.lengths)]} has an empty prompt; "
            "begin prompts with a token (bos, say)"
        )

    prompt_lengths = torch.from_numpy(prompt.lengths)
    response_lengths = torch.from_numpy(response.lengths)
    total = prompt_lengths + response_lengths
    owners = torch.arange(len(rows))
    if packing is Packing.SHARED:
        owners = torch.from_numpy(_owners(prompt))

    # Rows of one length have no padding, and positions that are the same for all of them.
    alike = bool((total == total[0]).all()) and len(owners.unique()) == len(rows)
    packed = packing is not Packing.PADDED and not alike
    if packed:
        size, prompt_at, response_at = _packed_places(prompt_lengths, response_lengths, owners)
        ids = torch.zeros(1, size, dtype=torch.int64)
    else:
        ids = torch.zeros(len(rows), int(total.max()), dtype=torch.int64)
        prompt_at = torch.arange(len(rows)) * ids.shape[1]
        response_at = prompt_at + prompt_lengths

    # Rows that share a prompt write the same tokens to one position.
    flat = ids.view(-1)
    row, at = counted(prompt_lengths)
    flat[prompt_at[row] + at] = torch.as_tensor(prompt.values).long()
    row, at = counted(response_lengths)
    flat[response_at[row] + at] = torch.as_tensor(response.values).long()

    return MicroBatch(
        ids.to(device, non_blocking=True),
        prompt_lengths,
        response_lengths,
        None if topk_ids is None else topk_ids.take(rows).padded().long().to(device),
        extras={name: column.take(rows) for name, column in (extras or {}).items()},
        prompt_at=prompt_at if packed else None,
        response_at=response_at if packed else None,
    )


def _packed_places(
    prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, owners: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return (tokens in all, the indices of prompts, those of responses), int64 [rows] each.

    owners: for each row the first one with its prompt. Whole rows and shared prompts come first,
    ascending by length, then the responses to shared prompts, by the lengths of both.
    """
    rows = torch.arange(len(owners))
    several = torch.bincount(owners, minlength=len(owners))[owners] > 1

    # Whole rows and shared prompts
    heads = rows[owners == rows]
    sizes = torch.where(several, prompt_lengths, prompt_lengths + response_lengths)[heads]
    order = sizes.argsort(stable=True)
    prompt_at = torch.zeros_like(owners)
    prompt_at[heads[order]] = sizes[order].cumsum(0) - sizes[order]
    prompt_at = prompt_at[owners]
    response_at = prompt_at + prompt_lengths

    # Responses to shared prompts, those of one prompt beside each other
    tails = rows[several]
    keys = (prompt_at, response_lengths, prompt_lengths)
    tails = tails[np.lexsort([key[tails].numpy() for key in keys])]
    lengths = response_lengths[tails]
    head_tokens = int(sizes.sum())
    response_at[tails] = head_tokens + lengths.cumsum(0) - lengths
    return head_tokens + int(lengths.sum()), prompt_at, response_at


def dummy_micro_batch(device: torch.device, topk: int = 0) -> MicroBatch:
    """Return one row of one prompt and one response token, whose loss is multiplied by 0."""
    one = torch.ones(1, dtype=torch.int64)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    topk_ids = torch.zeros(1, 1, topk, dtype=torch.int64, device=device) if topk else None
    return MicroBatch(ids, one, one, topk_ids, dummy=True)


def unpad(
    outputs: Sequence[torch.Tensor], plan: Sequence[np.ndarray], lengths: np.ndarray
) -> Column:
    """Return one token column in the rows' own order, from outputs [B, T, ...] per micro-batch.

    lengths: the response tokens of each row.
    """
    pieces = [
        Column.from_padded(output.detach().cpu(), lengths[rows])
        for output, rows in zip(outputs, plan, strict=True)
    ]
    order = np.argsort(np.concatenate(list(plan)), kind="stable")
    return Column.concat(pieces).take(order)
