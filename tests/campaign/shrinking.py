"""Finds fewer items that still show what was found (Zeller and Hildebrandt, "Simplifying and isolating
failure-inducing input", 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool], tries: int) -> list[T]:
    """Items of these that still fail, from which no single one can be left out, if the tries suffice.

    items: they fail; fails: whether some of them do, called at most `tries` times.
    """
    kept = list(items)
    parts = 2
    while len(kept) > 1 and tries > 0:
        size = -(-len(kept) // parts)
        pieces = [kept[start : start + size] for start in range(0, len(kept), size)]
        for piece in pieces:
            rest = [item for other in pieces if other is not piece for item in other]
            # Of two pieces the one is what the other's absence leaves.
            if rest and tries > 0:
                tries -= 1
                if fails(rest):
                    kept, parts = rest, max(parts - 1, 2)
                    break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return kept
