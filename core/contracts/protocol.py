"""Transfer protocols: how a call's arguments reach the ranks of a group, and whose results make up its result.

HybridFlow (arXiv:2409.19256), table 3. `distribute` gives one piece per rank, `sources` the ranks whose results count,
`collect` makes their results, in that order, into one. Batches are split by reference: rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol as Typing

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout


class GroupShape(Typing):
    """What a protocol may ask of a group."""

    layout: ParallelLayout
    generation: GenerationLayout | None


class TransferProtocol:
    """The contract; a subclass with a `name` is a plugin of kind "protocol".

    The base sends the same to all and returns the list of all results (ONE_TO_ALL). For a splitting protocol override
    `parts` and `part_of`; for anything else `distribute`, `called`, `sources`, `collect`.
    """

    name = "ONE_TO_ALL"
    splits = False
    """Whether batches inside lists and tuples of an argument are distributed one by one."""

    def distribute(self, group: GroupShape, value: Any) -> Sequence[Any]:
        """One piece per rank, for each argument of the call. Only Batches are split; other values go to every rank."""
        return [value] * group.layout.world

    def called(self, group: GroupShape) -> Sequence[int]:
        """The ranks that are called at all."""
        return range(group.layout.world)

    def sources(self, group: GroupShape) -> Sequence[int]:
        """The ranks whose results are collected, in the order in which `collect` gets them."""
        return self.called(group)

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        return list(results)


class SplitProtocol(TransferProtocol):
    """Splits a batch into `parts` in order; rank r gets part `part_of(r)`; results are put behind one another.

    Uneven batches give parts that differ by one row, and possibly empty ones. A result that is not a Batch comes back
    as a list, one entry per source; Metrics are merged.
    """

    splits = True

    def parts(self, group: GroupShape) -> int:
        raise NotImplementedError

    def part_of(self, group: GroupShape, rank: int) -> int:
        raise NotImplementedError

    def source_of(self, group: GroupShape, part: int) -> int:
        raise NotImplementedError

    def distribute(self, group: GroupShape, value: Any) -> Sequence[Any]:
        if not isinstance(value, Batch):
            return [value] * group.layout.world
        pieces = value.split(self.parts(group))
        return [pieces[self.part_of(group, rank)] for rank in range(group.layout.world)]

    def sources(self, group: GroupShape) -> Sequence[int]:
        return [self.source_of(group, part) for part in range(self.parts(group))]

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        if results and all(isinstance(r, Batch) for r in results):
            return Batch.concat(results)
        if results and all(isinstance(r, Metrics) for r in results):
            return Metrics.merge(results)
        return list(results)


class AllToAll(TransferProtocol):
    """The caller gives each argument as a list with one entry per rank."""

    name = "ALL_TO_ALL"

    def distribute(self, group: GroupShape, value: Any) -> Sequence[Any]:
        world = group.layout.world
        if not isinstance(value, (list, tuple)) or len(value) != world:
            got = (
                f"{len(value)} entries"
                if isinstance(value, (list, tuple))
                else type(value).__name__
            )
            raise HybridFlowError(
                f"ALL_TO_ALL needs a list with one entry for each of the {world} ranks, got {got}"
            )
        return value


class RankZero(TransferProtocol):
    """Rank 0 alone is called; its result is the result."""

    name = "RANK_ZERO"

    def called(self, group: GroupShape) -> Sequence[int]:
        return (0,)

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        return results[0]


class DataParallel(SplitProtocol):
    """Pure data parallelism: one part per dp rank; groups with tp, pp or cp need THREE_D."""

    name = "DP"

    def parts(self, group: GroupShape) -> int:
        layout = group.layout
        if layout.world != layout.dp:
            raise HybridFlowError(
                f"protocol DP needs a layout of dp alone, got {layout}; use THREE_D"
            )
        return layout.dp

    def part_of(self, group: GroupShape, rank: int) -> int:
        return group.layout.coords(rank).dp

    def source_of(self, group: GroupShape, part: int) -> int:
        return group.layout.rank(dp=part)


class ThreeD(SplitProtocol):
    """One part per replica for all its ranks; results from last stage, tp 0, cp 0. DP when tp = pp = cp = 1."""

    name = "THREE_D"

    def parts(self, group: GroupShape) -> int:
        return group.layout.dp

    def part_of(self, group: GroupShape, rank: int) -> int:
        return group.layout.coords(rank).dp

    def source_of(self, group: GroupShape, part: int) -> int:
        return group.layout.rank(dp=part, pp=group.layout.pp - 1)


class MicroDataParallel(SplitProtocol):
    """One part per generation replica, dp-major and micro-dp inner; results from the replica's last stage, tp 0."""

    name = "MICRO_DP"

    def _generation(self, group: GroupShape) -> GenerationLayout:
        if group.generation is None:
            raise HybridFlowError(
                "protocol MICRO_DP needs a group with a generation layout; this one has none"
            )
        return group.generation

    def parts(self, group: GroupShape) -> int:
        return len(self._generation(group).replicas)

    def part_of(self, group: GroupShape, rank: int) -> int:
        return self._generation(group).replica_of[rank]

    def source_of(self, group: GroupShape, part: int) -> int:
        return self._generation(group).output_rank(part)


class PipelineOnly(TransferProtocol):
    """Same data to every rank; results from the tp 0, cp 0, dp 0 rank of every stage, as a list."""

    name = "PP_ONLY"

    def sources(self, group: GroupShape) -> Sequence[int]:
        return [group.layout.rank(pp=stage) for stage in range(group.layout.pp)]


class PipelineAsDataParallel(SplitProtocol):
    """dp x pp parts, dp-major, pp inner: pipeline stages act as more replicas; results from tp 0, cp 0 of each."""

    name = "PP_AS_DP"

    def parts(self, group: GroupShape) -> int:
        return group.layout.dp * group.layout.pp

    def part_of(self, group: GroupShape, rank: int) -> int:
        at = group.layout.coords(rank)
        return at.dp * group.layout.pp + at.pp

    def source_of(self, group: GroupShape, part: int) -> int:
        dp, pp = divmod(part, group.layout.pp)
        return group.layout.rank(dp=dp, pp=pp)


class Protocol:
    """The eight built-in protocols."""

    ONE_TO_ALL = TransferProtocol()
    ALL_TO_ALL = AllToAll()
    RANK_ZERO = RankZero()
    DP = DataParallel()
    THREE_D = ThreeD()
    MICRO_DP = MicroDataParallel()
    PP_ONLY = PipelineOnly()
    PP_AS_DP = PipelineAsDataParallel()


BUILT_IN: tuple[TransferProtocol, ...] = tuple(v for k, v in vars(Protocol).items() if k.isupper())
