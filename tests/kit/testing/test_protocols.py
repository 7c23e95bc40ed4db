"""Every invariant of ProtocolConformance notices the fault that it is for."""

from __future__ import annotations

from helpers.expect import caught

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


ROWS = "test_rows_keep_their_order_and_none_is_lost_or_doubled"


def test_a_dropped_row_is_noticed():
    caught(ProtocolConformance, ROWS, "rows 0 to", "dropped", protocol=DropsTheLastRow())


def test_a_doubled_row_is_noticed():
    caught(ProtocolConformance, ROWS, "doubled", protocol=DoublesRows())


def test_another_order_is_noticed():
    caught(ProtocolConformance, ROWS, "in order", protocol=SplitsRoundRobin())


def test_a_piece_per_part_instead_of_per_rank_is_noticed():
    caught(
        ProtocolConformance,
        "test_there_is_one_piece_for_each_rank",
        "one per rank",
        protocol=GivesAPiecePerPart(),
    )


def test_results_that_count_twice_are_noticed():
    caught(ProtocolConformance, ROWS, "doubled", protocol=CountsAReplicaTwice())


def test_a_source_that_is_not_called_is_noticed():
    class CallsTooFew(ThreeD):
        def called(self, group):
            return (0,)

    name = "test_results_count_once_and_come_from_ranks_that_are_called"
    caught(ProtocolConformance, name, "each of them called", protocol=CallsTooFew())


def test_rows_whose_results_nobody_collects_are_noticed():
    name = "test_every_rank_works_on_a_part_that_some_source_has"
    caught(ProtocolConformance, name, "within a replica", protocol=SplitsOverAllRanks())


def test_parts_of_very_different_sizes_are_noticed():
    caught(
        ProtocolConformance,
        "test_parts_differ_by_one_row_at_most",
        "Batch.split",
        protocol=GivesTheRestToTheLast(),
    )


def test_a_cut_unit_is_noticed():
    caught(ProtocolConformance, "test_units_stay_whole", "whole units", protocol=CutsUnits())


def test_a_collect_in_another_order_is_noticed():
    caught(
        ProtocolConformance,
        "test_collect_undoes_distribute",
        "another order",
        protocol=CollectsBackwards(),
    )


def test_a_wrong_flag_is_noticed():
    class SaysItSplits(ProtocolConformance):
        returns_input = False

    caught(SaysItSplits, "test_collect_undoes_distribute", "returns_input", protocol=ThreeD())


def test_settings_that_do_not_reach_every_rank_are_noticed():
    caught(
        ProtocolConformance,
        "test_what_is_no_batch_reaches_every_rank",
        "every rank",
        protocol=SplitsSettings(),
    )


def test_metrics_of_one_rank_only_are_noticed():
    caught(
        ProtocolConformance,
        "test_metrics_of_the_parts_add_up",
        "Metrics.merge",
        protocol=ForgetsMetrics(),
    )
