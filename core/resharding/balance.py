"""Shares of senders: who sends how much of what several ranks hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_ROUNDS, _SETTLED = 200, 1e-3


def balance(
    demands: Mapping[tuple[int, ...], int], load: Mapping[int, float]
) -> dict[tuple[int, ...], list[int]]:
    """Bytes for each sender of each set, so that the most loaded sender has as little as possible.

    `demands`: set of senders -> bytes that any of them may send; `load`: what ranks send already. Every set in turn
    levels its bytes over its senders, given what the others put there. Each turn lowers the sum of squared loads, and
    the loads that make it least (a base of a polymatroid) also have the least maximum.
    """
    if not demands:
        return {}
    ranks = sorted({rank for senders in demands for rank in senders})
    place = {rank: i for i, rank in enumerate(ranks)}
    total = np.array([load.get(rank, 0.0) for rank in ranks])
    where = {senders: np.array([place[rank] for rank in senders]) for senders in demands}
    shares = {senders: np.zeros(len(senders)) for senders in demands}
    order = sorted(demands, key=lambda senders: (len(senders), senders))  # the least choice first
    for _ in range(_ROUNDS if len(order) > 1 else 1):
        change = 0.0
        for senders in order:
            at = where[senders]
            others = total[at] - shares[senders]
            share = level(others, demands[senders])
            change = max(change, float(np.abs(share - shares[senders]).max()))
            total[at], shares[senders] = others + share, share
        if change <= _SETTLED * max(float(total.max()), 1.0):
            break
    return {senders: _whole(share, demands[senders]) for senders, share in shares.items()}


def level(load: np.ndarray, amount: float) -> np.ndarray:
    """`amount` poured over vessels that stand at `load`: the lowest fill first."""
    if amount <= 0:
        return np.zeros(len(load))
    heights = np.sort(load)
    filled = np.arange(1, len(load) + 1) * heights - np.cumsum(
        heights
    )  # poured when the surface reaches heights[i]
    wet = int(np.searchsorted(filled, amount, side="left"))
    surface = (amount + heights[:wet].sum()) / wet
    return np.maximum(surface - load, 0.0)


def _whole(share: np.ndarray, amount: int) -> list[int]:
    """Whole bytes with the right sum."""
    if not amount:
        return [0] * len(share)
    cuts = np.rint(np.cumsum(share) * (amount / float(share.sum()))).astype(np.int64)
    cuts[-1] = amount
    return np.diff(cuts, prepend=0).tolist()
