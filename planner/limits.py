"""Bottlenecks of each stage of a step, and how well it uses the devices.

A stage is timed again on devices that are twice as fast in one respect. A stage that this respect
alone limits then takes half the time; one that does not depend on it takes as long as before:

    share of a respect = 2 * (1 - seconds on such devices / seconds)

Model FLOPs utilisation (arXiv:2204.02311, appendix B) is the operations that the model needs, per
second, over the peak of the matrix products. Operations that recomputation and logits in pieces add
do not count.
"""

from __future__ import annotations

from collections.abc import Mapping as Table

import attrs

from hybridflow.core.contracts.planner import STAGES
from hybridflow.planner.cluster import Efficiency, Nodes
from hybridflow.planner.jobs import JobPlan
from hybridflow.planner.machine import Machine
from hybridflow.planner.pools import PoolPlanner, after
from hybridflow.planner.search import Mapping, PlannedPool, slowest
from hybridflow.planner.tokens import trunk_flops

WORK = (
    "decode_step_us",
    "decode_layer_us",
    "decode_tp_layer_us",
    "eager_layer_us",
    "sequence_us",
    "micro_batch_us",
    "tp_layer_us",
    "update_ms",
    "call_ms",
    "sync_ms",
)
"""Fixed times of Efficiency: launches, scheduling, dispatch."""


def _faster(nodes: Nodes) -> Table[str, Nodes]:
    """Return respect -> the nodes with twice the speed in it."""
    device = nodes.device
    efficiency = nodes.efficiency
    wide = device.fp32_tflops
    products = attrs.evolve(
        device, tflops=2 * device.tflops, fp32_tflops=None if wide is None else 2 * wide
    )
    memory = attrs.evolve(device, bandwidth_gbs=2 * device.bandwidth_gbs)
    links = attrs.evolve(device, link_gbs=2 * device.link_gbs)
    host = attrs.evolve(device, host_gbs=2 * device.host_gbs)
    return {
        "matrix products": attrs.evolve(nodes, device=products),
        "memory bandwidth": attrs.evolve(nodes, device=memory),
        "links inside nodes": attrs.evolve(
            nodes, device=links, efficiency=_halved(efficiency, ["link_latency_us"])
        ),
        "the network between nodes": attrs.evolve(
            nodes,
            between_gbs=2 * nodes.between_gbs,
            efficiency=_halved(efficiency, ["network_latency_us"]),
        ),
        "the link to the host": attrs.evolve(nodes, device=host),
        "launches and work per sequence": attrs.evolve(nodes, efficiency=_halved(efficiency, WORK)),
    }


def _halved(efficiency: Efficiency, names: list[str] | tuple[str, ...]) -> Efficiency:
    return attrs.evolve(efficiency, **{name: getattr(efficiency, name) / 2 for name in names})


def limits(plan: JobPlan, mapping: Mapping) -> dict[str, list[tuple[str, float]]]:
    """Return, for each step stage with work, the respects that limit it with their shares, the
    largest first.
    """
    found: dict[str, list[tuple[str, float]]] = {
        verb: [] for verb, time in zip(STAGES, mapping.stages, strict=True) if time
    }
    kinds = [_faster(nodes) for nodes in plan.cluster.nodes]
    for respect in kinds[0]:
        faster = [_times(plan, pool, kinds[pool.kind][respect]) for pool in mapping.pools]
        for verb, before, now in zip(STAGES, mapping.stages, slowest(faster), strict=True):
            if before:
                found[verb].append((respect, 2.0 * (1.0 - now / before)))
    return {verb: sorted(rows, key=lambda row: -row[1]) for verb, rows in found.items()}


def _times(plan: JobPlan, pool: PlannedPool, nodes: Nodes) -> tuple[float, float, float]:
    """Return the seconds of a pool's step stages on other nodes, with its layouts and caches."""
    planner = PoolPlanner(nodes, plan.work.workload)
    generate = 0.0
    options = []
    for choice in pool.entry.choices:
        model = choice.option.model
        option = planner.option(model, choice.option.layout)
        options.append(option)
        if choice.engines is not None:
            generate += float(planner.generation(model, choice.engines, choice.cache_bytes))
            generate += planner.transition(option, choice.engines)
    infer = sum(option.infer for option in options)
    train = sum(option.train for option in options)
    moved = planner.moved([option.model for option in options])
    return (generate, *after(moved, infer, train))


def utilisation(plan: JobPlan, mapping: Mapping, verb: str) -> float:
    """Return the model FLOPs utilisation of "infer" or "train", in the stage's slowest pool."""
    stage = STAGES.index(verb)
    pool = max(mapping.pools, key=lambda pool: pool.entry.times[stage])
    machine = Machine(plan.cluster.nodes[pool.kind])
    workload = plan.work.workload

    # Seconds that the peak would take: precisions differ from model to model.
    ideal = 0.0
    for choice in pool.entry.choices:
        model = choice.option.model
        size = model.size
        passes = 2.0 + size.trained_share if verb == "train" else 1.0
        for task in workload.of(model.name, verb):
            trunk = workload.computed(model) * trunk_flops(size, workload.attended(model))
            head = workload.response_tokens * 2.0 * size.head_params
            operations = task.sequences * task.times * passes * (trunk + head)
            ideal += operations / machine.flops(model.execution.compute_bytes)
    return ideal / pool.entry.devices / pool.entry.times[stage]


def generated(plan: JobPlan) -> int:
    """Return the number of tokens that are generated in a step."""
    workload = plan.work.workload
    made = [task for task in workload.tasks if task.verb == "generate"]
    return sum(task.sequences * task.times for task in made) * workload.response_tokens
