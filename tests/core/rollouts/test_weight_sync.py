"""What every road of weights has in common."""

from __future__ import annotations

import socket

import pytest
import torch
from helpers.brute import layout, whole

from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.resharding.plan import ReshardError
from hybridflow.core.rollouts.weight_sync import (
    SyncCost,
    WeightSync,
    node_name,
    on_every_rank,
    sync_line,
)
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.values.weights import Box

EMBEDDINGS = layout({"embed": (4, 2)}, {0: {"embed": whole((4, 2))}})


class Road(WeightSync):
    """Writes down what happens."""

    def __init__(self, wrong: tuple[str, ...] = (), verify: bool = False):
        super().__init__(verify)
        self.wrong, self.steps = wrong, []

    def begin(self, version):
        self.steps.append(f"begin {version}")

    def expect(self, part):
        self.part = part

    def transfer(self, version):
        self.steps.append("transfer")
        if self.wrong == ("lost",):
            raise OSError("no route")

    def differing(self, version, part):
        assert part == self.part
        self.steps.append(f"compare {'all' if part is None else part}")
        return dict.fromkeys(self.wrong, "rank 1 has other values")

    def end(self):
        self.steps.append("end")


def test_each_update_proves_another_part_before_it_ends_and_all_of_them_every_32():
    road = Road()
    for version in range(34):
        road.run(version)
    assert road.steps[:8] == [
        "begin 0", "transfer", "compare all", "end", "begin 1", "transfer", "compare 1", "end",
    ]  # fmt: skip
    parts = [step.partition(" ")[2] for step in road.steps if step.startswith("compare")]
    assert parts == ["all", *map(str, range(1, 32)), "all", "1"]


def test_with_verify_each_update_proves_everything():
    road = Road(verify=True)
    for version in range(3):
        road.run(version)
    assert road.steps.count("compare all") == 3


def test_an_update_that_did_not_arrive_whole_is_not_ended_and_the_next_one_proves_everything():
    road = Road()
    road.run(4)
    road.wrong = ("norm", "embed")
    with pytest.raises(
        HybridFlowError,
        match=r"version 5: 2 parameters .* norm \(rank 1",
    ):
        road.run(5)
    road.wrong = ("lost",)
    with pytest.raises(OSError, match="no route"):
        road.run(6)
    assert road.steps.count("end") == 1
    road.wrong = ()
    road.run(7)
    assert road.steps[-2:] == ["compare all", "end"]


def context(train: ParallelLayout, tp: int) -> RankContext:
    return RankContext(
        "actor", 0, train, torch.device("cpu"), generation=generation_layout(train, 1, tp)
    )


def test_an_engine_that_tells_of_rank_0_is_on_every_rank_that_has_one_of_its_own():
    four = ParallelLayout(dp=4)
    assert dict(on_every_rank(EMBEDDINGS, context(four, 1)).held) == dict.fromkeys(
        range(4), EMBEDDINGS.held[0]
    )


def test_an_engine_of_several_ranks_speaks_for_itself():
    assert on_every_rank(EMBEDDINGS, context(ParallelLayout(dp=2), 2)) is EMBEDDINGS
    both = layout({"embed": (4, 2)}, {rank: {"embed": whole((4, 2))} for rank in range(2)})
    assert on_every_rank(both, context(ParallelLayout(dp=2), 1)) is both


def test_a_replica_holds_all_of_every_parameter_between_its_ranks():
    """Ranks 0 and 2 are one replica, 1 and 3 another; boxes may overlap, and norms are on each."""
    shapes = {"embed": (4, 2), "norm": (2,), "scale": ()}
    upper, lower = Box.part((4, 2), 0, 0, 2), Box.part((4, 2), 0, 2, 4)
    alike = {"norm": whole((2,)), "scale": whole(())}
    held = {
        0: {"embed": (upper,), **alike},
        2: {"embed": (lower,), **alike},
        1: {"embed": (lower, Box.part((4, 2), 0, 0, 1)), **alike},
        3: {"embed": (upper,), "norm": (), "scale": ()},
    }
    four = context(ParallelLayout(dp=4), 2)
    assert four.generation.groups("replica") == [[0, 2], [1, 3]]
    good = layout(shapes, held)
    assert on_every_rank(good, four) is good

    # The second replica has no element of row 1, and of a layout without boxes nobody has any.
    held[3] = {}
    with pytest.raises(ReshardError, match=r"on ranks 1, 3 does not hold \[1:2, 0:2\] of embed"):
        on_every_rank(layout(shapes, held), four)
    with pytest.raises(ReshardError, match=r"on ranks 0, 2 does not hold \[0:4, 0:2\] of embed"):
        on_every_rank(layout(shapes, {1: held[1]}), four)
    with pytest.raises(ReshardError, match="on rank 0 does not hold"):
        on_every_rank(good, context(ParallelLayout(dp=4), 1))


def test_a_node_has_its_hosts_name():
    assert node_name().startswith(f"{socket.gethostname()}:")
    assert node_name() == node_name()


def test_the_line_before_the_first_step_has_the_most_of_any_rank():
    costs = [
        SyncCost(1_500_000, 7_000_000, 12, "collective"),
        SyncCost(2_000_000, 6_000_000, 12, "collective"),
    ]
    line = sync_line(costs)
    assert "2.00 MB per rank (12 rounds over collective)" in line and "7.00 MB at its peak" in line
    assert "moves nothing between ranks" in sync_line([SyncCost(0, 500, 0, "collective")])
