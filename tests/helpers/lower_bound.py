"""What any plan must move, computed without one."""

from __future__ import annotations

import numpy as np

from hybridflow.core.values.weights import Box, WeightLayout


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
