"""An independent account of a plan, element by element: layouts as boolean arrays; what any plan must move."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hybridflow.core.values.weights import Box, Param, WeightLayout


def mask(shape, boxes) -> np.ndarray:
    found = np.zeros(shape, np.int32)
    for box in boxes:
        found[box.slices()] += 1
    return found


def layout(
    shapes: dict[str, tuple[int, ...]], held: dict, dtype=torch.float32, **kwargs
) -> WeightLayout:
    return WeightLayout({n: Param(s, dtype) for n, s in shapes.items()}, held, **kwargs)


def check_plan(plan) -> None:
    """Every lacking element arrives once, nothing held travels, senders hold what they send, figures are sums."""
    arrived: dict = {}
    sent = dict.fromkeys(plan.ranks, 0)
    received = dict.fromkeys(plan.ranks, 0)
    transfers = list(plan.transfers)
    assert len(transfers) == len(plan.transfers)
    for t in transfers:
        shape, size = plan.target.params[t.name].shape, plan.wire[t.name].itemsize
        key = (t.receiver, t.name)
        arrived.setdefault(key, np.zeros(shape, np.int32))[t.box.slices()] += 1
        own = mask(shape, plan.source.held[t.sender].get(plan.origin[t.name], ()))
        assert own[t.box.slices()].all(), "a sender sends what it does not hold"
        assert t.sender != t.receiver
        sent[t.sender] += t.box.numel * size
        received[t.receiver] += t.box.numel * size
    for rank in plan.target.held:
        for name, boxes in plan.target.held[rank].items():
            shape = plan.target.params[name].shape
            wanted = mask(shape, boxes) > 0
            held = mask(shape, plan.source.held.get(rank, {}).get(plan.origin[name], ())) > 0
            got = arrived.get((rank, name), np.zeros(shape, np.int32))
            assert (got == (wanted & ~held)).all()
            own = np.zeros(shape, np.int32)
            for at, box in plan.local(rank):
                if at == name:
                    own[box.slices()] += 1
            assert (own == (wanted & held)).all()
    assert received == plan.bytes_received
    assert sent == plan.bytes_sent


def best_balance(plan) -> float:
    """The least that the most loaded sender can send if boxes could be cut anywhere: over every set of ranks, what only
    they can send, divided by their number (Hall's condition)."""
    demands: dict[frozenset, int] = {}
    for name, param in plan.target.params.items():
        size = plan.wire[name].itemsize
        held = {
            r: mask(param.shape, h.get(plan.origin[name], ())) > 0
            for r, h in plan.source.held.items()
        }
        for rank, wants in plan.target.held.items():
            need = mask(param.shape, wants.get(name, ())) > 0
            if rank in held:
                need &= ~held[rank]
            for index in (
                zip(*np.nonzero(need), strict=True) if param.shape else ([()] if need else [])
            ):
                holders = frozenset(r for r, m in held.items() if m[index])
                demands[holders] = demands.get(holders, 0) + size
    ranks = sorted({r for s in demands for r in s})
    best = 0.0
    for count in range(1, len(ranks) + 1):
        for chosen in itertools.combinations(ranks, count):
            inside = frozenset(chosen)
            best = max(best, sum(v for s, v in demands.items() if s <= inside) / count)
    return best


def whole(shape) -> tuple[Box, ...]:
    return (Box.full(shape),)


def lower_bound(source: WeightLayout, target: WeightLayout, rank: int) -> int:
    """Return the bytes that a rank must receive in any plan: |target \\ held|, straight from the
    boxes.

    Each parameter counts in the narrower of its two dtypes, in which it is sent.
    """
    # Box by box, without a plan: a check on the plans themselves.
    held = source.held.get(rank, {})
    total = 0
    for name, boxes in target.held.get(rank, {}).items():
        # A tied parameter is held under another name.
        origin = name if name in source.params else source.ties[name]
        size = min(source.params[origin].dtype.itemsize, target.params[name].dtype.itemsize)

        # What is left of the target's boxes without the boxes that the rank holds.
        missing = [box for box in boxes if box.numel]
        for own in held.get(origin, ()):
            parts: list[Box] = []
            for box in missing:
                parts += box.minus(own)
            missing = parts
        numbers = np.sum([box.numel for box in missing], dtype=np.int64)
        total += size * int(numbers)
    return total
