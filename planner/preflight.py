"""Checks whether a placed job fits the memory of its devices, before anything is built.

The formulas are those of `hybridflow plan` (needs.py); here the devices are measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping as Table

import attrs

from hybridflow.core.contracts.planner import (
    DeviceMemory,
    NotPlanned,
    PlannableJob,
    PoolMemory,
)
from hybridflow.core.job.job import PlacedModel
from hybridflow.planner.cluster import DEVICES, GB, Cluster, Efficiency, Nodes
from hybridflow.planner.jobs import JobPlan, Plannable, plannable
from hybridflow.planner.needs import Member, pool_memory
from hybridflow.planner.pools import PoolPlanner
from hybridflow.planner.switches import Switches

LEAST = 1e-6
"""The usable share of a device on which nothing is free."""


def job_memory(job: PlannableJob, devices: Table[str, DeviceMemory]) -> list[PoolMemory]:
    """Return the memory that the job takes on the devices of each pool, for Planner.memory."""
    work = plannable(job)
    if any(m.layout.cp * m.layout.ep > 1 for m in job.models.values()):
        raise NotPlanned("context and expert parallelism are not planned")

    # A pool without models takes nothing.
    kinds = {name: _nodes(memory, job.pools[name].world) for name, memory in devices.items()}
    found = []
    for name, nodes in kinds.items():
        if members := _members(job, name):
            found.append(_pool(work, nodes, name, members))
    if all(memory.fits for memory in found):
        return found

    # Each pool stays on its own devices.
    cluster = Cluster(tuple(kinds.values()))
    lines = _remedies(JobPlan(job, cluster, work, pools=tuple(kinds)))
    return [memory if memory.fits else attrs.evolve(memory, remedies=lines) for memory in found]


def _nodes(memory: DeviceMemory, world: int) -> Nodes:
    """Return one node of devices with this memory, and with the rates of a known device."""
    # Rates decide only which of several remedies comes first.
    device = attrs.evolve(DEVICES["h100-80gb"], memory_gb=memory.total / GB, name="device")
    share = Efficiency().usable
    usable = max(min(share, memory.free / memory.total), LEAST)
    return Nodes(device, 1, world, between_gbs=25.0, efficiency=Efficiency(usable=usable))


def _members(job: PlannableJob, pool: str) -> dict[str, PlacedModel]:
    """Return role -> placed model, for those with a model or an engine on a pool."""
    return {
        role: placed
        for role, placed in job.models.items()
        if pool in (placed.pool, placed.rollout_pool)
    }


def _pool(work: Plannable, nodes: Nodes, name: str, members: Table[str, PlacedModel]) -> PoolMemory:
    """Return the fullest moment of one pool."""
    planner = PoolPlanner(nodes, work.workload)
    models = {model.name: model for model in work.models}
    placed = []
    for role, one in members.items():
        model = models[role]
        option = planner.option(model, one.layout) if one.pool == name else None
        here = (one.rollout_pool or one.pool) == name
        placed.append(Member(model, option, one.generation if here else None))
    return pool_memory(planner, name, placed, yields=work.device != "cpu")


def _remedies(plan: JobPlan) -> tuple[str, ...]:
    """Return the fewest settings with which the job fits as it is placed; () where none do."""
    switches = Switches(plan, placed=True)
    try:
        trial = switches.that_fit()
    except NotPlanned:
        return ()
    return () if trial is None else tuple(switches.lines(trial.changes))
