"""Transfer protocols: how a call's arguments reach a group's ranks, and who returns its result.

They are those of HybridFlow (arXiv:2409.19256), table 3.

    argument  --distribute-->  one piece per rank
                                    |  the ranks in `called` run the method
    result    <--collect----   the results of the ranks in `sources`

Batches are split by reference: their rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol as Typing

from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout


class GroupShape(Typing):
    """The attributes of a group that a protocol may use."""

    layout: ParallelLayout
    generation: GenerationLayout | None


class TransferProtocol:
    """The contract; a subclass with a `name` is a plugin of kind "protocol".

    The base sends the same to all ranks and returns the list of all results (ONE_TO_ALL). A
    protocol that splits batches derives from SplitProtocol; any other one overrides `distribute`,
    `called`, `sources` and `collect`.
    """

    name = "ONE_TO_ALL"
    splits = False
    """Whether batches inside lists and tuples of an argument are distributed one by one."""

    # --- the way there ---

    def distribute(self, group: GroupShape, value: Any) -> Sequence[Any]:
        """Return the piece of an argument for each rank; here it is the whole value.

        SplitProtocol splits Batches, and any other value goes to every rank.
        """
        return [value] * group.layout.world

    def called(self, group: GroupShape) -> Sequence[int]:
        """Return the ranks that run the method at all."""
        return range(group.layout.world)

    # --- the way back ---

    def sources(self, group: GroupShape) -> Sequence[int]:
        """Return the ranks whose results count, in the order in which `collect` gets them."""
        return self.called(group)

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        """Return the call's result, made of the results of the sources."""
        return list(results)


class SplitProtocol(TransferProtocol):
    """Splits a batch into `parts` in order; rank r gets part `part_of(r)`.

    Uneven batches give parts that differ by one row, and possibly empty ones. Results that are
    Batches are concatenated and Metrics are merged; others come back as a list, one per source.
    """

    splits = True

    # --- what a subclass defines ---

    def parts(self, group: GroupShape) -> int:
        """Return the number of parts of a batch."""
        raise NotImplementedError

    def part_of(self, group: GroupShape, rank: int) -> int:
        """Return the part that a rank gets."""
        raise NotImplementedError

    def source_of(self, group: GroupShape, part: int) -> int:
        """Return the rank whose result counts for a part."""
        raise NotImplementedError

    # --- derived from these ---

    def distribute(self, group: GroupShape, value: Any) -> Sequence[Any]:
        # Other values are options of the call, which every rank needs.
        if not isinstance(value, Batch):
            return [value] * group.layout.world

        pieces = value.split(self.parts(group))
        return [pieces[self.part_of(group, rank)] for rank in range(group.layout.world)]

    def sources(self, group: GroupShape) -> Sequence[int]:
        return [self.source_of(group, part) for part in range(self.parts(group))]

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        # References to the parts' rows; nothing is fetched here.
        if results and all(isinstance(result, Batch) for result in results):
            return Batch.concat(results)
        if results and all(isinstance(result, Metrics) for result in results):
            return Metrics.merge(results)
        return list(results)


class AllToAll(TransferProtocol):
    """The caller gives each argument as a list with one entry per rank."""

    name = "ALL_TO_ALL"

    def distribute(self, group: GroupShape, value: Any) -> Sequence[Any]:
        # The message has the actual type, or the number of entries.
        world = group.layout.world
        got = type(value).__name__
        if isinstance(value, (list, tuple)):
            if len(value) == world:
                return value
            got = f"{len(value)} entries"
        raise HybridFlowError(
            f"ALL_TO_ALL needs a list with one entry for each of the {world} ranks, got {got}"
        )


class RankZero(TransferProtocol):
    """Rank 0 alone is called; its result is the result."""

    name = "RANK_ZERO"

    def called(self, group: GroupShape) -> Sequence[int]:
        return (0,)

    def collect(self, group: GroupShape, results: Sequence[Any]) -> Any:
        return results[0]


class DataParallel(SplitProtocol):
    """Pure data parallelism: one part per dp rank. Groups with tp, pp or cp need THREE_D."""

    name = "DP"

    def parts(self, group: GroupShape) -> int:
        # With other axes, ranks of one replica would get different rows.
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
    """One part per replica, sent to all its ranks; the same as DP when tp = pp = cp = 1.

    Results come from each replica's last pipeline stage, tp 0, cp 0: it has the model's outputs.
    """

    name = "THREE_D"

    def parts(self, group: GroupShape) -> int:
        return group.layout.dp

    def part_of(self, group: GroupShape, rank: int) -> int:
        return group.layout.coords(rank).dp

    def source_of(self, group: GroupShape, part: int) -> int:
        return group.layout.rank(dp=part, pp=group.layout.pp - 1)


class MicroDataParallel(SplitProtocol):
    """One part per generation replica, dp-major and micro-dp inner.

    Results come from each replica's last pipeline stage, tp 0.
    """

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
    """Sends the same to every rank; returns one result per pipeline stage (tp 0, cp 0, dp 0)."""

    name = "PP_ONLY"

    def sources(self, group: GroupShape) -> Sequence[int]:
        return [group.layout.rank(pp=stage) for stage in range(group.layout.pp)]


class PipelineAsDataParallel(SplitProtocol):
    """Pipeline stages act as further replicas: dp x pp parts, dp-major and pp inner.

    Results come from tp 0, cp 0 of each.
    """

    name = "PP_AS_DP"

    def parts(self, group: GroupShape) -> int:
        return group.layout.dp * group.layout.pp

    def part_of(self, group: GroupShape, rank: int) -> int:
        coords = group.layout.coords(rank)
        return coords.dp * group.layout.pp + coords.pp

    def source_of(self, group: GroupShape, part: int) -> int:
        # The inverse of part_of.
        dp, pp = divmod(part, group.layout.pp)
        return group.layout.rank(dp=dp, pp=pp)


class Protocol:
    """The eight built-in protocols."""

    # The same for all, or one entry each
    ONE_TO_ALL = TransferProtocol()
    ALL_TO_ALL = AllToAll()
    RANK_ZERO = RankZero()

    # Batches in parts
    DP = DataParallel()
    THREE_D = ThreeD()
    MICRO_DP = MicroDataParallel()

    # By pipeline stage
    PP_ONLY = PipelineOnly()
    PP_AS_DP = PipelineAsDataParallel()


BUILT_IN: tuple[TransferProtocol, ...] = tuple(
    protocol for name, protocol in vars(Protocol).items() if name.isupper()
)
"""The built-in protocols, in the order of Protocol."""
