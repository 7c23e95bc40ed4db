"""The best mapping by trying everything: every placement, allocation, kind of device and combination of layouts.

Shares the simulators with the planner (what a layout costs), and nothing of its search.
"""

from __future__ import annotations

import itertools

import numpy as np

from helpers.planned import engines as engines_on, laid_out
from hybridflow.planner.memory import Memory
from hybridflow.planner.times import Simulator

NEVER = float("inf")


def share(model):
    """Of a device's memory, at most, for a model's engine."""
    return 1.0 if model.limits.memory_share is None else model.limits.memory_share


def placements(names):
    """Each name gets a number; equal numbers share a pool."""
    for labels in itertools.product(range(len(names)), repeat=len(names)):
        if all(label <= max((*labels[:i], -1)) + 1 for i, label in enumerate(labels)):
            yield [
                [n for n, at in zip(names, labels, strict=True) if at == pool]
                for pool in range(max(labels) + 1)
            ]


def sizes(nodes):
    """Halves of a node, and whole nodes (nodes of the tests have 1, 2 or 4 devices)."""
    return [n for n in (1, 2) if n < nodes.per_node] + [
        nodes.per_node * c for c in range(1, nodes.count + 1)
    ]


def divides(model, tp):
    s = model.shape
    return (
        s.heads % tp == 0
        and s.intermediate % tp == 0
        and (s.kv_heads % tp == 0 or tp % s.kv_heads == 0)
    )


def layouts(model, nodes, devices, workload):
    rows = [
        t.sequences for t in workload.tasks if t.role == model.name and t.verb in ("infer", "train")
    ]
    for pp, tp, dp in itertools.product(range(1, devices + 1), repeat=3):
        if (
            pp * tp * dp != devices
            or nodes.per_node % tp
            or not divides(model, tp)
            or tp > nodes.per_node
        ):
            continue
        if (
            model.shape.layers % pp
            or (pp > 1 and "pp" not in model.axes)
            or (rows and dp > max(rows))
        ):
            continue
        if model.settings.takes(model.shape, laid_out(pp, tp, dp)):
            yield laid_out(pp, tp, dp)


def engines(model, nodes, devices):
    for pp, tp in itertools.product((1, 2, 4, 8), range(1, nodes.per_node + 1)):
        if (
            devices % (pp * tp) == 0
            and nodes.per_node % tp == 0
            and divides(model, tp)
            and model.shape.layers % pp == 0
        ):
            yield engines_on(devices, pp, tp)


def pool_times(members, nodes, devices, workload):
    """[(generate, infer, train)] of all combinations of layouts of the pool's models that have the memory."""
    sim = Simulator.of(nodes, workload)
    made = []
    for chosen in itertools.product(*(list(layouts(m, nodes, devices, workload)) for m in members)):
        taken = [Memory(sim).bytes(m, layout) for m, layout in zip(members, chosen, strict=True)]
        resident = sum(b.resident for b in taken)
        device = nodes.device.memory_gb * 1e9
        most = max(max(b.training, b.inference) for b in taken)
        if resident + most > nodes.memory:
            continue
        stages = {"generate": 0.0, "infer": 0.0, "train": 0.0}
        generating = False
        for model, layout, own in zip(members, chosen, taken, strict=True):
            moves = sim.moves(model, layout, own.fetched)
            for task in workload.tasks:
                if task.role == model.name and task.verb == "infer":
                    stages["infer"] += task.times * (
                        moves + sim.inference(model, task.sequences, layout)
                    )
                elif task.role == model.name and task.verb == "train":
                    stages["train"] += task.times * (
                        moves + sim.update(model, task.sequences, layout)
                    )
            mine = [t for t in workload.tasks if t.role == model.name and t.verb == "generate"]
            if not mine:
                continue
            generating = True
            best = NEVER
            for rollout in engines(model, nodes, devices):
                limits = model.limits
                whole = model.size.params * limits.weight_bytes / (rollout.pp * rollout.tp)
                free = nodes.memory - resident - Memory(sim).engine_weights(model, layout, rollout)
                if model.keeps_engine:
                    free -= most
                free = min(free, share(model) * device - whole)
                if limits.cache_gb is not None:
                    free = min(free, limits.cache_gb * 1e9)
                if limits.cache_tokens is not None:
                    parts = rollout.pp * min(rollout.tp, model.shape.kv_heads)
                    free = min(free, limits.cache_tokens * model.cache_bytes / parts)
                seconds = [sim.generation(model, t.sequences, rollout, free) for t in mine]
                total = float(sum(t.times * s for t, s in zip(mine, seconds, strict=True)))
                best = min(
                    best,
                    total
                    + (moves + sim.transition(model, layout, rollout) if model.trained else 0.0),
                )
            stages["generate"] += best
        if stages["generate"] == NEVER:
            continue
        if not generating:
            rows = max(
                [t.sequences * t.times for t in workload.tasks if t.verb == "generate"], default=0
            )
            moved = rows * workload.tokens * workload.row_bytes / sim.machine.network_rate
            if stages["infer"]:
                stages["infer"] += moved
            elif stages["train"]:
                stages["train"] += moved
        made.append((stages["generate"], stages["infer"], stages["train"]))
    return np.array(made).reshape(-1, 3)


def best_seconds(cluster, workload, models):
    """Of a step; infinite where nothing fits."""
    by_name = {m.name: m for m in models}
    known: dict = {}
    best = NEVER
    for pools in placements(list(by_name)):
        for kinds in itertools.product(range(len(cluster.nodes)), repeat=len(pools)):
            for counts in itertools.product(*(sizes(cluster.nodes[k]) for k in kinds)):
                used = [
                    sum(c for c, k in zip(counts, kinds, strict=True) if k == kind)
                    for kind in range(len(cluster.nodes))
                ]
                if any(u > nodes.devices for u, nodes in zip(used, cluster.nodes, strict=True)):
                    continue
                tables = []
                for names, kind, count in zip(pools, kinds, counts, strict=True):
                    at = (tuple(names), kind, count)
                    if at not in known:
                        known[at] = pool_times(
                            [by_name[n] for n in names], cluster.nodes[kind], count, workload
                        )
                    tables.append(known[at])
                if all(len(t) for t in tables):
                    stages = tables[0]
                    for table in tables[
                        1:
                    ]:  # every row of one with every row of the other: a stage ends with its slowest
                        stages = np.maximum(stages[:, None], table[None]).reshape(-1, 3)
                    best = min(best, float(stages.sum(1).min()))
    return best
