"""Every invariant of ProtocolConformance notices the fault that it is for."""

from __future__ import annotations

from helpers.expect import caught, each_fault

from hybridflow.core.contracts.protocol import SplitProtocol, ThreeD
from hybridflow.core.values.batch import Batch
from hybridflow.kit.testing import ProtocolConformance


class DropsTheLastRow(ThreeD):
    def distribute(self, group, value):
        if isinstance(value, Batch):
            value = value.take(slice(0, value.rows // group.layout.dp * group.layout.dp))
        return super().distribute(group, value)


class DoublesRows(ThreeD):
    """Pads an uneven batch with its first rows, and leaves them in."""

    def distribute(self, group, value):
        if isinstance(value, Batch) and value.rows:
            more = -value.rows % group.layout.dp
            value = value.take([*range(value.rows), *([0] * more)])
        return super().distribute(group, value)


class SplitsRoundRobin(ThreeD):
    def distribute(self, group, value):
        if not isinstance(value, Batch):
            return super().distribute(group, value)
        dp = group.layout.dp
        pieces = [value.take(list(range(i, value.rows, dp))) for i in range(dp)]
        return [pieces[self.part_of(group, rank)] for rank in range(group.layout.world)]


class GivesAPiecePerPart(ThreeD):
    def distribute(self, group, value):
        if isinstance(value, Batch):
            return value.split(group.layout.dp)
        return super().distribute(group, value)


class CountsAReplicaTwice(ThreeD):
    def sources(self, group):
        return range(group.layout.world)


class SplitsOverAllRanks(SplitProtocol):
    """Ranks of one replica work on different rows, and tp 0 alone is asked."""

    def parts(self, group):
        return group.layout.world

    def part_of(self, group, rank):
        return rank

    def source_of(self, group, part):
        return part

    def sources(self, group):
        return [group.layout.rank(dp=d, pp=group.layout.pp - 1) for d in range(group.layout.dp)]


class GivesTheRestToTheLast(ThreeD):
    def distribute(self, group, value):
        if not isinstance(value, Batch):
            return super().distribute(group, value)
        dp, size = group.layout.dp, value.rows // group.layout.dp
        stops = [size * (i + 1) for i in range(dp - 1)] + [value.rows]
        pieces = [value.take(slice(a, b)) for a, b in zip([0, *stops], stops, strict=False)]
        return [pieces[self.part_of(group, rank)] for rank in range(group.layout.world)]


class CutsUnits(ThreeD):
    def distribute(self, group, value):
        if isinstance(value, Batch):
            value = value.take(slice(0, value.rows))  # forgets which rows belong together
        return super().distribute(group, value)


class CollectsBackwards(ThreeD):
    def collect(self, group, results):
        return super().collect(group, list(results)[::-1])


class SplitsSettings(ThreeD):
    def distribute(self, group, value):
        return (
            super().distribute(group, value)
            if isinstance(value, Batch)
            else [value] + [None] * (group.layout.world - 1)
        )


class ForgetsMetrics(ThreeD):
    def collect(self, group, results):
        return super().collect(group, results) if isinstance(results[0], Batch) else results[0]


class CallsTooFew(ThreeD):
    def called(self, group):
        return (0,)


FAULTS = {
    "test_there_is_one_piece_for_each_rank": [GivesAPiecePerPart],
    "test_rows_keep_their_order_and_none_is_lost_or_doubled": [
        DropsTheLastRow,
        DoublesRows,
        SplitsRoundRobin,
        CountsAReplicaTwice,
    ],
    "test_results_count_once_and_come_from_ranks_that_are_called": [CallsTooFew],
    "test_every_rank_works_on_a_part_that_some_source_has": [SplitsOverAllRanks],
    "test_parts_differ_by_one_row_at_most": [GivesTheRestToTheLast],
    "test_units_stay_whole": [CutsUnits],
    "test_collect_undoes_distribute": [CollectsBackwards],
    "test_what_is_no_batch_reaches_every_rank": [SplitsSettings],
    "test_metrics_of_the_parts_add_up": [ForgetsMetrics],
}


@each_fault(ProtocolConformance, FAULTS)
def test_the_fault_is_noticed(fault, method):
    caught(ProtocolConformance, method, protocol=fault())


def test_a_wrong_flag_is_noticed():
    class SaysItSplits(ProtocolConformance):
        returns_input = False

    caught(SaysItSplits, "test_collect_undoes_distribute", protocol=ThreeD())
