"""What a weight update has brought of the boxes that an engine takes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.weights import Box


class Arrivals:
    """Counts the elements of one update, for each rank and parameter."""

    def __init__(self, held: Mapping[int, Mapping[str, Sequence[Box]]], apart: Container[str] = ()):
        """`held`: what each rank takes; `apart`: parameters that somebody else counts."""
        self.held = held
        self.lacks: dict[tuple[int, str], int] = {}
        """(rank, parameter) -> the number of elements that have not arrived."""
        for rank, own in held.items():
            for name, boxes in own.items():
                if name not in apart and boxes:
                    self.lacks[rank, name] = sum(box.numel for box in boxes)

    def note(self, rank: int, name: str, box: Box) -> None:
        """Count the elements of a box that the rank takes."""
        if (rank, name) in self.lacks:
            own = self.held[rank][name]
            common = (box.intersect(one) for one in own)
            self.lacks[rank, name] -= sum(part.numel for part in common if part is not None)

    def written(self, rank: int, name: str, version: int | None) -> int | None:
        """Return this update's version where it has brought the whole parameter, else None."""
        return version if self.lacks.get((rank, name), 1) <= 0 else None

    def check(self, complete: bool) -> None:
        """Raise HybridFlowError where a parameter came in part, or one has never arrived.

        complete: every parameter has arrived in an earlier update.
        """
        # What has begun to arrive must arrive in full.
        for (rank, name), lacks in self.lacks.items():
            whole = sum(box.numel for box in self.held[rank][name])
            if 0 < lacks < whole:
                raise HybridFlowError(
                    f"the weight update brought only {whole - lacks} of {whole} elements of {name}"
                )
        missing = list(dict.fromkeys(name for (_, name), lacks in self.lacks.items() if lacks > 0))
        if missing and not complete:
            every = dict.fromkeys(name for _, name in self.lacks)
            raise HybridFlowError(
                f"the first weight update lacks {len(missing)} of {len(every)} "
                f"parameters: {', '.join(missing[:3])}"
            )
