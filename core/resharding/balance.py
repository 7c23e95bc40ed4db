"""Even shares for the senders of boxes that several ranks hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_ROUNDS = 200
_SETTLED = 1e-3
"""Iterations end when no share changes by more than this part of the largest load."""


def balance(
    demands: Mapping[tuple[int, ...], int], load: Mapping[int, float]
) -> dict[tuple[int, ...], list[int]]:
    """Return bytes for each sender of each set, so that the largest load of a sender is least.

    `demands`: set of senders -> bytes that any of them may send; `load`: rank -> bytes that it
    sends already. Every set in turn levels its bytes over its senders, given the bytes of the other
    sets. Each turn lowers the sum of squared loads, and the loads with the least such sum (a base
    of a polymatroid) also have the least maximum.
    """
    if not demands:
        return {}

    # total[i] is the load of ranks[i]; places has the indices i of each set's senders.
    ranks = sorted(set().union(*demands))
    place = {rank: i for i, rank in enumerate(ranks)}
    total = np.array([load.get(rank, 0.0) for rank in ranks])
    places = {}
    shares = {}
    for senders in demands:
        places[senders] = np.array([place[rank] for rank in senders])
        shares[senders] = np.zeros(len(senders))

    order = sorted(demands, key=lambda senders: (len(senders), senders))  # least choice first
    for _ in range(_ROUNDS if len(order) > 1 else 1):
        change = 0.0
        for senders in order:
            # The loads from other sets stay; this set's bytes are distributed anew.
            indices = places[senders]
            others = total[indices] - shares[senders]
            share = level(others, demands[senders])
            change = max(change, float(np.abs(share - shares[senders]).max()))
            total[indices] = others + share
            shares[senders] = share
        if change <= _SETTLED * max(float(total.max()), 1.0):
            break
    return {senders: _whole_bytes(share, demands[senders]) for senders, share in shares.items()}


def level(load: np.ndarray, amount: float) -> np.ndarray:
    """Return how to add `amount` to the loads so that their maximum is least, float [n].

    The lowest loads are raised first (water-filling). To raise the sorted loads h[0] to h[i] to
    h[i] takes (i + 1) h[i] - (h[0] + ... + h[i]). If `amount` raises the first k loads, their
    common level s solves k s - (h[0] + ... + h[k - 1]) = amount.
    """
    if amount <= 0:
        return np.zeros(len(load))

    heights = np.sort(load)
    poured = np.arange(1, len(load) + 1) * heights - np.cumsum(heights)
    wet = int(np.searchsorted(poured, amount, side="left"))
    surface = (amount + heights[:wet].sum()) / wet
    return np.maximum(surface - load, 0.0)


def _whole_bytes(share: np.ndarray, amount: int) -> list[int]:
    """Round shares to integers whose sum is `amount`, by rounding their running sums."""
    if not amount:
        return [0] * len(share)

    factor = amount / float(share.sum())  # about 1
    cuts = np.rint(np.cumsum(share) * factor).astype(np.int64)
    cuts[-1] = amount  # exactly, whatever rounding did to the factor
    return np.diff(cuts, prepend=0).tolist()
