"""What a weight update has brought of the boxes that a rank's engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box


class Arrivals:
    """Counts the elements of boxes in one update: every element must arrive, and once.

    Boxes that the rank does not take count for nothing.
    """

    def __init__(self, held: Mapping[str, Sequence[Box]]):
        """`held`: what the rank takes of each parameter, boxes that do not overlap."""
        self.held = held
        self._lacks: dict[str, int] = {}
        """Parameter -> the number of elements that have not arrived."""
        for name, boxes in held.items():
            if elements := sum(box.numel for box in boxes):
                self._lacks[name] = elements
        self._came: dict[str, list[Box]] = {}

    def note(self, name: str, box: Box) -> None:
        """Note the elements of a box. Raises HybridFlowError where some of them came before."""
        if name not in self._lacks:
            return
        came = self._came.setdefault(name, [])
        for own in self.held[name]:
            common = box.intersect(own)
            if common is None:
                continue
            if any(common.intersect(earlier) is not None for earlier in came):
                raise HybridFlowError(
                    f"the weight update brought elements of {name} twice: the box {common.start} "
                    f"to {common.stop}"
                )
            came.append(common)
            self._lacks[name] -= common.numel

    def whole(self, name: str) -> bool:
        """Return whether all that the rank takes of a parameter has arrived."""
        return not self._lacks.get(name)

    def check(self) -> None:
        """Raise HybridFlowError where something is missing."""
        missing = []
        for name, lacks in self._lacks.items():
            if lacks:
                elements = sum(box.numel for box in self.held[name])
                some = f" ({elements - lacks} of {elements} elements came)"
                missing.append(f"{name}{some if lacks < elements else ''}")
        if missing:
            raise HybridFlowError(
                f"the weight update lacks {len(missing)} of {len(self._lacks)} parameters: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            )
