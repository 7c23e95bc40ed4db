"""Seconds of matrix products, collectives and messages on equal nodes, by hand."""

from __future__ import annotations

import attrs
import pytest

from hybridflow.core.contracts.footprint import CollectiveCost
from hybridflow.planner import Device, Nodes
from hybridflow.planner.cluster import Efficiency
from hybridflow.planner.machine import Machine

NODES = Nodes(
    Device(memory_gb=1, tflops=10, bandwidth_gbs=100, link_gbs=100),
    count=2,
    per_node=4,
    between_gbs=10,
    efficiency=Efficiency(
        memory=0.8,
        optimizer=0.25,
        link=0.5,
        network=0.5,
        link_latency_us=2.0,
        network_latency_us=20.0,
    ),
)
MACHINE = Machine(NODES)
SIZE = 8e9
"""Bytes: 0.16 s over a link inside a node, 1.6 s over the network."""


def test_rates_are_the_data_sheets_times_the_efficiencies():
    assert MACHINE.memory_peak == 1e11
    assert (MACHINE.memory_rate, MACHINE.optimizer_rate) == pytest.approx((8e10, 2.5e10))
    assert (MACHINE.link_rate, MACHINE.network_rate) == pytest.approx((5e10, 5e9))


def test_float32_has_a_peak_of_its_own_where_the_sheet_says_one():
    assert (MACHINE.flops(2), MACHINE.flops(4)) == (1e13, 1e13)
    wide = Machine(attrs.evolve(NODES, device=attrs.evolve(NODES.device, fp32_tflops=1)))
    assert (wide.flops(2), wide.flops(4)) == (1e13, 1e12)


def test_collectives_inside_a_node_go_round_a_ring():
    assert MACHINE.gather(SIZE, 4) == pytest.approx(0.75 * 0.16 + 3 * 2e-6)
    assert MACHINE.all_reduce(SIZE, 4) == pytest.approx(2 * (0.75 * 0.16 + 3 * 2e-6))
    assert MACHINE.all_reduce(SIZE, 1) == MACHINE.gather(SIZE, 1) == 0.0
    assert MACHINE.gather(SIZE, 2, step=2) == pytest.approx(
        0.5 * 0.16 + 2e-6
    )  # every second rank of a node


def test_groups_that_leave_a_node_share_its_way_out():
    assert MACHINE.gather(SIZE, 8) == pytest.approx(7 / 8 * 1.6 + 7 * 20e-6)  # one group of all
    assert MACHINE.gather(SIZE, 2, step=4) == pytest.approx(
        4 * 0.5 * 1.6 + 20e-6
    )  # four groups of two
    assert MACHINE.gather(SIZE, 2, step=8) == MACHINE.gather(
        SIZE, 2, step=4
    )  # no more than a node has ranks


def test_a_fast_network_makes_a_link_no_faster():
    fast = Machine(attrs.evolve(NODES, between_gbs=1e4))
    assert fast.gather(SIZE, 8) == pytest.approx(7 / 8 * 0.16 + 7 * 20e-6)


def test_collectives_one_after_the_other_add_up():
    every = (
        CollectiveCost("all_gather", SIZE, 4, 1, times=3),
        CollectiveCost("reduce_scatter", SIZE, 2, 2),
        CollectiveCost("all_reduce", SIZE, 2, 4, times=2),
    )
    gathers = 3 * MACHINE.gather(SIZE, 4) + MACHINE.gather(SIZE, 2, 2)
    assert MACHINE.collectives(every) == pytest.approx(gathers + 2 * MACHINE.all_reduce(SIZE, 2, 4))
    assert MACHINE.collectives(()) == 0.0


def test_a_message_takes_the_link_or_a_share_of_the_network():
    assert MACHINE.send(SIZE, 3) == pytest.approx(0.16 + 2e-6)
    assert MACHINE.send(SIZE, 4) == pytest.approx(4 * 1.6 + 20e-6)  # all four ranks of a node send
