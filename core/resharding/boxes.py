"""Many boxes at once: whether they overlap, which ones touch another, what they leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hybridflow.core.values.weights import Box


def _arrays(boxes: Sequence[Box]) -> tuple[np.ndarray, np.ndarray]:
    dims = len(boxes[0].start)
    return (
        np.array([b.start for b in boxes], np.int64).reshape(len(boxes), dims),
        np.array([b.stop for b in boxes], np.int64).reshape(len(boxes), dims),
    )


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two of them share an element: a sweep along the dimension in which they begin at the most places."""
    boxes = [b for b in boxes if b.numel]
    if len(boxes) < 2:
        return True
    starts, stops = _arrays(boxes)
    varying = np.flatnonzero((starts != starts[0]).any(0) | (stops != stops[0]).any(0))
    if len(varying) == 0:
        return False
    if len(varying) == 1:
        order = np.argsort(starts[:, varying[0]], kind="stable")
        return bool((stops[order[:-1], varying[0]] <= starts[order[1:], varying[0]]).all())
    sweep = max(varying.tolist(), key=lambda dim: len(np.unique(starts[:, dim])))
    order = np.argsort(starts[:, sweep], kind="stable")
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(
        starts[:, sweep], stops[:, sweep]
    )  # those from there on begin behind this one's end
    for at in np.flatnonzero(ends > np.arange(1, len(boxes) + 1)).tolist():
        others = slice(at + 1, int(ends[at]))
        if ((starts[at] < stops[others]) & (starts[others] < stops[at])).all(1).any():
            return False
    return True


def overlaps(boxes: Sequence[Box]) -> Callable[[Box], list[int]]:
    """A function that gives the numbers of the boxes that share an element with one, in order."""
    if not boxes:
        return lambda box: []
    starts, stops = _arrays(boxes)

    def touching(box: Box) -> list[int]:
        inside = (starts < np.array(box.stop, np.int64)) & (stops > np.array(box.start, np.int64))
        return np.flatnonzero(inside.all(1)).tolist()

    return touching


def covers(box: Box, parts: Iterable[Box]) -> list[Box]:
    """What `parts` leave open of `box`."""
    rest = [box]
    for part in parts:
        rest = [left for one in rest for left in one.minus(part)]
    return rest
