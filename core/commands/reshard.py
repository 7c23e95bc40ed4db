"""`hybridflow reshard`: what moving a model's weights from a training layout to a rollout layout costs, engine by engine."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from rich.console import Console

from hybridflow.core.commands.printing import make_console, print_line, print_table
from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean
from hybridflow.core.parallel import GenerationLayout, ParallelLayout, generation_layout
from hybridflow.core.resharding.explain import amount, print_explained
from hybridflow.core.resharding.gather import gather_plan
from hybridflow.core.resharding.layouts import engine_layout, fsdp_layout, megatron_layout, zero3_layout
from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
from hybridflow.core.resharding.shapes import ModelShape
from hybridflow.core.weights import WeightLayout

SIZES = ("pp", "tp", "dp", "cp", "ep")
KINDS = ("megatron", "fsdp", "zero3")
SHOWN = 16
"""Groups and ranks that are listed one by one."""


@attrs.frozen
class Source:
    """--from: a training layout and the backend that cuts the weights by it."""

    layout: ParallelLayout
    kind: str
    vpp: int = 1

    def weights(self, shape: ModelShape, dtype: torch.dtype) -> WeightLayout:
        params = shape.params(dtype)
        if self.kind == "fsdp":
            return fsdp_layout(params, self.layout, ties=shape.ties)
        if self.kind == "zero3":
            return zero3_layout(params, self.layout.world, shape.ties)
        return megatron_layout(shape, self.layout, params, self.vpp)


def read_sizes(text: str, option: str, allowed: Sequence[str]) -> dict[str, str]:
    """ "pp=2,tp=4" as a table. Raises ConfigError naming what is not known."""
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in allowed:
            raise ConfigError(
                [f"{option} {text!r}: {part!r} is not one of {', '.join(f'{a}=...' for a in allowed)}"
                 + did_you_mean(key, allowed)]
            )  # fmt: skip
        found[key] = value
    return found


def _sizes(table: dict[str, str], option: str, keys: Sequence[str]) -> dict[str, int]:
    problems = [f"{option}: {k} is {table[k]!r}, not a whole number of at least 1" for k in keys
                if k in table and not (table[k].isdigit() and int(table[k]))]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return {k: int(table[k]) for k in keys if k in table}


def read_source(text: str) -> Source:
    table = read_sizes(text, "--from", (*SIZES, "vpp", "order", "kind"))
    sizes = _sizes(table, "--from", (*SIZES, "vpp"))
    kind, vpp = table.get("kind", "megatron"), sizes.pop("vpp", 1)
    if kind not in KINDS:
        raise ConfigError([f"--from: kind is {kind!r}; there are {', '.join(KINDS)}"])
    try:
        layout = ParallelLayout(**sizes, order=table.get("order", "tp-cp-pp-dp"))
    except ValueError as error:
        raise ConfigError([f"--from {text!r}: {error}"]) from error
    folded = [axis for axis in SIZES if axis != "dp" and getattr(layout, axis) > 1]
    if kind != "megatron" and folded:
        raise ConfigError([f"--from: kind {kind} shards over dp alone; leave out {', '.join(folded)}"])
    return Source(layout, kind, vpp)


def reshard(
    source: str, target: str, model: str, dtype: str = "bfloat16", grouping: str = "zero-redundancy",
    ranks: bool = False, console: Console | None = None,
) -> None:  # fmt: skip
    """Print the table. Raises ConfigError for layouts that cannot be; reads a config, moves nothing."""
    console = console or make_console()
    origin, shape = read_source(source), ModelShape.read(model)
    sizes = _sizes(read_sizes(target, "--to", ("pp", "tp")), "--to", ("pp", "tp"))
    layout = origin.layout
    try:
        asked, ordinary = (
            generation_layout(layout, sizes.get("pp", 1), sizes.get("tp", 1), g) for g in (grouping, "consecutive")
        )
    except ValueError as error:
        raise ConfigError([f"--to {target!r}: {error}"]) from error
    weights = getattr(torch, dtype)
    held = origin.weights(shape, weights)
    params = shape.params(weights)
    plan = plan_reshard(held, engine_layout(shape, asked, params))
    _head(console, model, shape, origin, asked, weights)
    everything = zero3_layout(params, layout.world, shape.ties)
    sliced = engine_layout(shape, ordinary, params)
    replica = gather_plan(held, sliced, layout.groups("tp-cp-pp" if origin.kind == "megatron" else "tp-cp-pp-dp"))
    rows = [
        ("gather over everything", gather_plan(everything, sliced, [list(range(layout.world))])),
        ("gather over a replica, ordinary groups", replica),
        (f"planned, {grouping} groups", plan),
    ]
    print_table(
        console,
        ("engine", "bytes received", "peak memory of weights", "redundant copy"),
        [(name, *_worst(made)) for name, made in rows],
    )
    print_line(console, "each figure: of the worst rank, buckets not counted")
    print_line(console)
    _groups(console, plan, asked)
    if ranks:
        print_line(console)
        print_explained(console, plan, SHOWN)


def _head(console: Console, model: str, shape: ModelShape, source: Source, asked: GenerationLayout, dtype) -> None:
    total = sum(p.numel for p in shape.params().values())
    layout = source.layout
    print_line(
        console,
        f"{model}: {total / 1e9:.2f} billion parameters, {amount(total * dtype.itemsize)} in "
        f"{str(dtype).removeprefix('torch.')}",
    )
    print_line(
        console,
        f"from {source.kind} {layout} ({layout.world} ranks, {layout.order}) to {len(asked.replicas)} replicas of pp "
        f"{asked.pp} x tp {asked.tp}",
    )
    print_line(console)


def _worst(plan: ReshardPlan) -> tuple[str, str, str]:
    return tuple(amount(max(f.values())) for f in (plan.bytes_received, plan.peak_bytes, plan.bytes_redundant))  # type: ignore[return-value]


def _groups(console: Console, plan: ReshardPlan, asked: GenerationLayout) -> None:
    names = {"tp": "generation tp groups", "pp": "generation pp groups", "micro_dp": "micro-dp groups"}
    for kind, name in names.items():
        groups = asked.groups(kind)
        if all(len(g) == 1 for g in groups):
            continue
        shown = " ".join(str(g).replace(" ", "") for g in groups[:SHOWN])
        print_line(console, f"{name:<22}{shown}{' ...' if len(groups) > SHOWN else ''}")
    print_line(console)
    peers = talkers(plan)
    for rank in plan.ranks[:SHOWN]:
        print_line(console, f"rank {rank} receives from {_runs(sorted(peers.get(rank, ())))}")
    if len(plan.ranks) > SHOWN:
        print_line(console, f"... and {len(plan.ranks) - SHOWN} ranks more")


def talkers(plan: ReshardPlan) -> dict[int, set[int]]:
    """Receiver -> the ranks that send to it."""
    found: dict[int, set[int]] = {}
    for flow in plan.flows:
        for sender, receiver in flow.pairs():
            found.setdefault(receiver, set()).add(sender)
    return found


def _runs(ranks: Sequence[int]) -> str:
    """0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "nobody"
