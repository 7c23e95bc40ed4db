"""The program that every rank of a group runs, and how its methods are called from the controller.

A worker class derives from Worker and marks with `@register` what the controller may call. Each
rank holds one instance, which finds its place among the others in its RankContext.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hybridflow.core.contracts.protocol import Protocol, TransferProtocol
from hybridflow.core.contracts.runtime import Store
from hybridflow.core.processes.page import doing
from hybridflow.core.values.parallel import Coords, GenerationLayout, ParallelLayout

COLLECTIVE_TIMEOUT = "collective timeout"
"""The name under which workers share how long a collective may take, a timedelta."""
EVERY_AXIS = "tp-cp-pp-dp"
"""The axis name under which `RankContext.group` gives the process group of all ranks."""


Part = tuple[str, float, float]
"""A part of a call: (name, start, end), in seconds since the epoch."""


@attrs.define(eq=False)
class RankContext:
    """A worker's environment: its rank, coordinates, device and process groups."""

    # Identity
    role: str
    """Name of the role that this worker serves."""
    rank: int
    """Number of this rank within its torch.distributed group, from 0."""

    # Where it works
    layout: ParallelLayout
    """Layout of that group: of all ranks of the role, or of one engine's, in a pool of engines."""
    device: torch.device
    seed: int = 0
    """Seed of the run; it is the same on every rank."""
    generation: GenerationLayout | None = None
    """Layout of generation, where the role has a rollout engine."""
    store: Store | None = attrs.field(default=None, repr=False)
    """The runtime's object store."""
    shared: dict[str, Any] = attrs.field(factory=dict, repr=False)
    """Objects that the workers of this process share, by name."""
    pool_rank: int = attrs.field(
        default=attrs.Factory(lambda self: self.rank, takes_self=True), kw_only=True
    )
    """Number of this rank within its pool, and its role's worker group."""
    _groups: dict[str, dist.ProcessGroup | None] = attrs.field(factory=dict, repr=False)
    """The process groups made up to now, by axis."""
    _parts: list[Part] = attrs.field(factory=list, repr=False)
    """The parts of the present call."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show what the body does, as a part of the present call, in the run's timeline."""
        started = time.time()
        try:
            with doing(name):
                yield
        finally:
            self._parts.append((name, started, time.time()))

    def take_parts(self) -> tuple[Part, ...]:
        """Return the parts of the call that ends here."""
        parts, self._parts = tuple(self._parts), []
        return parts

    @property
    def world_size(self) -> int:
        """The number of ranks of the torch.distributed group."""
        return self.layout.world

    @property
    def coords(self) -> Coords:
        """The coordinates of this rank in the layout."""
        return self.layout.coords(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return this rank's process group along an axis; None when the group has one rank.

        `axis` is one of the layout ("dp", "tp", "cp-dp", ...), or "generation.tp",
        "generation.pp", "generation.replica" or "generation.micro_dp" for the generation layout.
        The first call for an axis makes its groups, a collective operation: every rank asks for the
        same axes in the same order.
        """
        if axis not in self._groups:
            # The same axis name has different ranks in training and in generation.
            kind = axis.removeprefix("generation.")
            if kind != axis:
                assert self.generation is not None
                ranks = self.generation.groups(kind)
            else:
                ranks = self.layout.groups(axis)

            self._groups[axis] = self._make(ranks)
        return self._groups[axis]

    def _make(self, ranks: list[list[int]]) -> dist.ProcessGroup | None:
        """Make all groups of an axis, and return the one that this rank belongs to."""
        if all(len(members) == 1 for members in ranks):
            return None
        if not dist.is_initialized():
            raise RuntimeError(
                f"role {self.role!r} needs process groups of {len(ranks[0])} ranks, and the "
                "runtime gives none: the inline runtime has them for one rank only; use runtime=ray"
            )

        # torch requires every process to create every group, also those it is not in.
        own_group = None
        for members in ranks:
            group = dist.new_group(members, timeout=self.shared.get(COLLECTIVE_TIMEOUT))
            if self.rank in members:
                own_group = group
        return own_group

    def sum(self, values: Sequence[float], axis: str = "dp") -> list[float]:
        """Return the element-wise sum over the ranks of an axis, in float64."""
        return self._reduce(values, axis, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float], axis: str = "dp") -> list[float]:
        """Return the element-wise maximum over the ranks of an axis, in float64."""
        return self._reduce(values, axis, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], axis: str, op: Any) -> list[float]:
        # A single rank, or an empty list, needs no collective.
        group = self.group(axis)
        if group is None or not values:
            return list(values)

        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op, group=group)
        return tensor.tolist()


class Worker:
    """Base of every worker. One instance per rank; workers of a pool share their rank's process."""

    def __init__(self, context: RankContext):
        self.context = context

    @property
    def rank(self) -> int:
        """The number of this rank within its torch.distributed group, from 0."""
        return self.context.rank

    def close(self) -> None:
        """Release child processes and files that would outlive the object."""


def register(
    protocol: TransferProtocol | str = Protocol.THREE_D,
    *,
    same_rows: bool = True,
    reads: Sequence[str] | Callable[..., Sequence[str] | None] | None = None,
    writes: Sequence[str] | Callable[..., Sequence[str]] | None = None,
    early: bool = False,
    late: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a worker's method callable on its group.

    protocol: how arguments and results travel: a TransferProtocol, or the name of one (of a plugin,
        too).
    same_rows: whether a returned Batch has the rows of the first batch argument. If so, later calls
        can be sent before this one returns. Pass False for a method that adds or drops rows.
    reads: the columns that the method needs, or a function of the call's arguments that returns
        them; only these are sent and waited for. None stands for all columns.
    writes: the columns of the returned Batch where they are known before the call, or a function of
        the call's arguments that returns them: what asks for the names does not wait then.
    early: whether training changes nothing of what the method does, so that a step that is written
        ahead (run.max_staleness) sends the call before its turn, to any pool.
    late: whether the call needs work that is under way, on its ranks or others, so that a step that
        is written ahead sends it when that is done, or when its result is asked for.

    Annotate the method's return type: a `-> Batch` stays on the workers and is passed on by
    reference; any other result is sent to the controller.
    """

    # WorkerGroup finds the marked methods by this attribute.
    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function._registered = (  # type: ignore[attr-defined]
            protocol,
            same_rows,
            reads,
            writes,
            early,
            late,
        )
        return function

    return mark
