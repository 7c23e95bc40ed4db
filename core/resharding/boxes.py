"""Operations on many boxes at once: overlaps, and the parts of a box that they do not cover."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hybridflow.core.values.weights import Box


def _arrays(boxes: Sequence[Box]) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and the stops of the boxes, int64 [boxes, dims] each."""
    shape = (len(boxes), len(boxes[0].start))
    starts = np.array([box.start for box in boxes], np.int64)
    stops = np.array([box.stop for box in boxes], np.int64)
    return starts.reshape(shape), stops.reshape(shape)


def disjoint(boxes: Sequence[Box]) -> bool:
    """Return whether no two boxes share an element. Boxes without elements are ignored."""
    boxes = [box for box in boxes if box.numel]
    if len(boxes) < 2:
        return True

    # Dimensions in which all boxes are alike decide nothing.
    starts, stops = _arrays(boxes)
    same_starts = (starts == starts[0]).all(0)
    same_stops = (stops == stops[0]).all(0)
    varying = np.flatnonzero(~(same_starts & same_stops))
    if len(varying) == 0:
        return False

    # Intervals of one dimension: each must end before the next begins.
    if len(varying) == 1:
        dim = varying[0]
        order = np.argsort(starts[:, dim], kind="stable")
        ends = stops[order[:-1], dim]
        return bool((ends <= starts[order[1:], dim]).all())

    # Sweep along the dimension with the most distinct starts. A box can only overlap those after it
    # that begin before it ends, which are numbers index + 1 to ends[index] - 1.
    sweep = max(varying.tolist(), key=lambda dim: len(np.unique(starts[:, dim])))
    order = np.argsort(starts[:, sweep], kind="stable")
    starts = starts[order]
    stops = stops[order]
    ends = np.searchsorted(starts[:, sweep], stops[:, sweep])
    touching = ends > np.arange(1, len(boxes) + 1)
    for index in np.flatnonzero(touching).tolist():
        others = slice(index + 1, int(ends[index]))
        overlapping = (starts[index] < stops[others]) & (starts[others] < stops[index])
        if overlapping.all(1).any():
            return False
    return True


def overlaps(boxes: Sequence[Box]) -> Callable[[Box], list[int]]:
    """Return a function: box -> indices of the `boxes` that share an element with it, in order."""
    if not boxes:
        return lambda box: []

    # The arrays are made once, for all the boxes that will be asked about.
    starts, stops = _arrays(boxes)

    def touching(box: Box) -> list[int]:
        start = np.array(box.start, np.int64)
        stop = np.array(box.stop, np.int64)
        overlapping = (starts < stop) & (stops > start)
        return np.flatnonzero(overlapping.all(1)).tolist()

    return touching


def covers(box: Box, parts: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that make up the part of `box` that `parts` do not cover."""
    rest = [box]
    for part in parts:
        rest = subtract(rest, part)
    return rest


def subtract(boxes: Iterable[Box], part: Box) -> list[Box]:
    """Return the boxes without the elements of `part`."""
    return [piece for box in boxes for piece in box.minus(part)]
