"""The program that every rank of a group runs, and how its methods are called from the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.protocol import Protocol, TransferProtocol
from hybridflow.core.contracts.runtime import Store
from hybridflow.core.values.parallel import Coords, GenerationLayout, ParallelLayout

EVERY_AXIS = "tp-cp-pp-dp"
"""Names the group of all ranks of a layout."""


@attrs.define(eq=False)
class RankContext:
    """Where this worker is: its rank and coordinates, its device, and process groups made on demand."""

    role: str
    rank: int
    layout: ParallelLayout
    device: torch.device
    seed: int = 0
    generation: GenerationLayout | None = None
    store: Store | None = attrs.field(default=None, repr=False)
    """The runtime's object store."""
    _groups: dict[str, dist.ProcessGroup | None] = attrs.field(factory=dict, repr=False)

    @property
    def world_size(self) -> int:
        return self.layout.world

    @property
    def coords(self) -> Coords:
        return self.layout.coords(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of an axis of the layout ("dp", "tp", "cp-dp", ...), or "tp"/"micro_dp" of generation as
        "generation.tp"; None when it has one rank. A collective call: every rank asks for the same groups in one order.
        """
        if axis not in self._groups:
            kind = axis.removeprefix("generation.")
            if kind != axis:
                assert self.generation is not None
                ranks = self.generation.groups(kind)
            else:
                ranks = self.layout.groups(axis)
            self._groups[axis] = self._make(ranks)
        return self._groups[axis]

    def _make(self, ranks: list[list[int]]) -> dist.ProcessGroup | None:
        if all(len(r) == 1 for r in ranks):
            return None
        if not dist.is_initialized():
            raise RuntimeError(
                f"role {self.role!r} needs process groups of {len(ranks[0])} ranks, and the runtime gives none: the "
                "inline runtime has them for one rank only; use runtime=ray"
            )
        mine = None
        for members in ranks:
            group = dist.new_group(members)
            if self.rank in members:
                mine = group
        return mine

    def sum(self, values: Sequence[float], axis: str = "dp") -> list[float]:
        """Element-wise sum over the ranks of an axis, in float64."""
        return self._reduce(values, axis, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float], axis: str = "dp") -> list[float]:
        return self._reduce(values, axis, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], axis: str, op: Any) -> list[float]:
        group = self.group(axis)
        if group is None or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op, group=group)
        return tensor.tolist()


class Worker:
    """Base of every worker. One instance per rank; workers of one pool share their rank's process."""

    def __init__(self, context: RankContext):
        self.context = context

    @property
    def rank(self) -> int:
        return self.context.rank

    def close(self) -> None:
        """Give back what outlives the object (child processes, files)."""


def register(
    protocol: TransferProtocol | str = Protocol.THREE_D,
    *,
    same_rows: bool = True,
    reads: Sequence[str] | Callable[..., Sequence[str] | None] | None = None,
    writes: Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a worker's method callable on its group.

    protocol: a TransferProtocol, or the name of one (plugins too).
    same_rows: a returned Batch has the rows of the first batch argument, so that later calls can be sent before this
        one returns. Say False if the method adds or drops rows.
    reads: the columns that it needs, or a function of the call's arguments that gives them; only these are sent and
        waited for. None: all.
    writes: the columns of the returned Batch, if they are always the same.
    Annotate the return type: `-> Batch` stays on the workers and is handed on by reference; anything else is returned.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function._registered = (
            protocol,
            same_rows,
            reads,
            tuple(writes) if writes is not None else None,
        )  # type: ignore[attr-defined]
        return function

    return mark
