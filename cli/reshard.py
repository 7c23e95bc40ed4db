"""`hybridflow reshard`: what moving a model's weights from a training layout to a rollout layout costs, engine by engine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console

from hybridflow.cli.explain import print_explained
from hybridflow.cli.gather import gather_plan
from hybridflow.core.config.load import parse_value
from hybridflow.core.config.structure import structure
from hybridflow.core.contracts.command import Command
from hybridflow.core.contracts.rollout import EngineSettings, engine_settings
from hybridflow.core.contracts.training import TrainingSettings, training_settings
from hybridflow.core.errors import ConfigError
from hybridflow.core.names import did_you_mean
from hybridflow.core.plugins import registry
from hybridflow.core.resharding.plan import ReshardPlan, plan_reshard
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout, generation_layout
from hybridflow.core.values.units import amount
from hybridflow.core.values.weights import WeightLayout
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.kit.huggingface.shapes import PUBLISHED, read_fields
from hybridflow.kit.layouts import zero3_layout

SIZES = ("pp", "tp", "dp", "cp", "ep")
SHOWN = 16
"""Groups and ranks that are listed one by one."""


class ReshardCommand(Command):
    """A plugin of kind "command", name "reshard"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--from",
            dest="source",
            required=True,
            metavar="LAYOUT",
            help='"backend=NAME,pp=2,tp=4,dp=2", also cp, ep, order=tp-cp-dp-pp, and settings of the backend',
        )
        parser.add_argument(
            "--to",
            dest="target",
            required=True,
            metavar="LAYOUT",
            help='"tp=2", also pp, engine=NAME and settings of the engine',
        )
        parser.add_argument(
            "--model",
            required=True,
            help="a model folder, a config.json, or a name such as llama-70b",
        )
        parser.add_argument(
            "--dtype",
            default="bfloat16",
            choices=("bfloat16", "float16", "float32"),
            help="of the weights",
        )
        parser.add_argument(
            "--grouping",
            default="zero-redundancy",
            choices=("zero-redundancy", "consecutive"),
            help="which ranks form a replica",
        )
        parser.add_argument("--ranks", action="store_true", help="also the figures of every rank")

    def run(self, arguments: argparse.Namespace) -> int:
        a = arguments
        reshard(a.source, a.target, a.model, a.dtype, a.grouping, a.ranks)
        return 0


@attrs.frozen
class Source:
    """--from: a training layout and the backend that cuts the weights by it."""

    layout: ParallelLayout
    backend: str
    settings: TrainingSettings

    def shape(self, model: str) -> ModelShape:
        """A published name, else the fields of a config as the backend reads them."""
        return (
            PUBLISHED[model]
            if model in PUBLISHED
            else self.settings.model_shape(read_fields(model))
        )

    def weights(self, shape: ModelShape, dtype: torch.dtype) -> WeightLayout:
        planned = self.settings.planned_layout(shape, self.layout, dtype)
        if not self.settings.takes(shape, self.layout):
            raise ConfigError(
                f"--from: backend {self.backend} takes no layout {self.layout} of this model; change its sizes, or name "
                "another backend"
            )
        return planned


@attrs.frozen
class Target:
    """--to: sizes of a rollout engine, and the engine."""

    pp: int
    tp: int
    engine: str
    settings: EngineSettings


def read_table(text: str, option: str) -> dict[str, str]:
    """ "pp=2,tp=4" as a table. Raises ConfigError."""
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{option} {text!r}: {part!r} is no key=value")
        found[key] = value
    return found


def _sizes(table: dict[str, str], option: str, keys: Sequence[str]) -> dict[str, int]:
    problems = [
        f"{option}: {key} is {table[key]!r}, not a whole number of at least 1"
        for key in keys
        if key in table and not (table[key].isdigit() and int(table[key]))
    ]
    if problems:
        raise ConfigError(problems)
    return {key: int(table.pop(key)) for key in keys if key in table}


def _settings(
    kind: str, name: str, table: Mapping[str, str], option: str, sizes: Sequence[str]
) -> Any:
    """What is no size is a setting of the plugin. Raises ConfigError, PluginError."""
    config_class = registry().config_class(kind, name)
    known = [*sizes, *(attrs.fields_dict(config_class) if config_class else ())]
    if strange := [key for key in table if key not in known]:
        raise ConfigError(
            f"{option}: {strange[0]!r} is neither a size nor a setting of {kind} {name!r}"
            f"{did_you_mean(strange[0], known)} (there are {', '.join(known)})"
        )
    return (
        structure({key: parse_value(value) for key, value in table.items()}, config_class, option)
        if config_class
        else None
    )


def read_source(text: str) -> Source:
    """--from. Raises ConfigError, PluginError for a backend that there is not."""
    table = read_table(text, "--from")
    sizes = _sizes(table, "--from", SIZES)
    name = table.pop("backend", "") or registry().default("training_backend")
    order = table.pop("order", "tp-cp-pp-dp")
    config = _settings("training_backend", name, table, "--from", (*SIZES, "order", "backend"))
    try:
        layout = ParallelLayout(**sizes, order=order)
    except ValueError as error:
        raise ConfigError(f"--from {text!r}: {error}") from error
    has = registry().training_capabilities(name).axes
    if lacking := [
        f"{axis} {size}" for axis, size in sizes.items() if size > 1 and axis not in has
    ]:
        raise ConfigError(
            f"--from {text!r}: backend {name} has no {', '.join(lacking)}; its axes are {', '.join(sorted(has))}"
        )
    return Source(layout, name, training_settings(config))


def read_target(text: str) -> Target:
    """--to. Raises ConfigError, PluginError for an engine that there is not."""
    table = read_table(text, "--to")
    sizes = _sizes(table, "--to", ("pp", "tp"))
    name = table.pop("engine", "") or registry().default("rollout_engine")
    config = _settings("rollout_engine", name, table, "--to", ("pp", "tp", "engine"))
    can = registry().engine_capabilities(name)
    if lacking := [
        axis
        for axis, able in (("tp", can.tp), ("pp", can.pp))
        if sizes.get(axis, 1) > 1 and not able
    ]:
        raise ConfigError(
            f"--to {text!r}: engine {name} has no {' and no '.join(lacking)}; leave it out"
        )
    return Target(sizes.get("pp", 1), sizes.get("tp", 1), name, engine_settings(config))


def reshard(
    source: str, target: str, model: str, dtype: str = "bfloat16", grouping: str = "zero-redundancy",
    ranks: bool = False, console: Console | None = None,
) -> None:  # fmt: skip
    """Print the table. Raises ConfigError for layouts that cannot be; reads a config, moves nothing."""
    console = console or make_console()
    origin, wanted = read_source(source), read_target(target)
    shape, layout = origin.shape(model), origin.layout
    if registry().engine_capabilities(wanted.engine).grouping == "consecutive":
        grouping = "consecutive"
    try:
        asked, ordinary = (
            generation_layout(layout, wanted.pp, wanted.tp, kind)
            for kind in (grouping, "consecutive")
        )
    except ValueError as error:
        raise ConfigError(f"--to {target!r}: {error}") from error
    weights = getattr(torch, dtype)
    held = origin.weights(shape, weights)
    plan = plan_reshard(held, wanted.settings.planned_layout(shape, asked, weights))
    _head(console, model, shape, origin, wanted, asked, weights)
    everything = zero3_layout(shape.params(weights), layout.world, shape.ties)
    sliced = wanted.settings.planned_layout(shape, ordinary, weights)
    rows = [
        ("gather over everything", gather_plan(everything, sliced, [list(range(layout.world))])),
        (
            "gather over a replica, ordinary groups",
            gather_plan(held, sliced, _replicas(held, layout)),
        ),
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


def _replicas(held: WeightLayout, layout: ParallelLayout) -> list[list[int]]:
    """The smallest groups of ranks that hold everything together: replicas, or all where dp shares the weights too."""
    groups = layout.groups("tp-cp-pp")
    first = set(groups[0])
    for name, shards in held.shards().items():
        boxes = {box for rank, own in shards.items() if rank in first for box in own}
        if sum(box.numel for box in boxes) < held.params[name].numel:
            return layout.groups("tp-cp-pp-dp")
    return groups


def _head(
    console: Console, model: str, shape: ModelShape, source: Source, target: Target, asked: GenerationLayout,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    total = sum(p.numel for p in shape.params().values())
    layout = source.layout
    print_line(
        console,
        f"{model}: {total / 1e9:.2f} billion parameters, {amount(total * dtype.itemsize)} in "
        f"{str(dtype).removeprefix('torch.')}",
    )
    print_line(
        console,
        f"from {source.backend} {layout} ({layout.world} ranks, {layout.order}) to {len(asked.replicas)} replicas of "
        f"{target.engine} pp {asked.pp} x tp {asked.tp}",
    )
    print_line(console)


def _worst(plan: ReshardPlan) -> tuple[str, str, str]:
    return tuple(
        amount(max(f.values()))
        for f in (plan.bytes_received, plan.peak_bytes, plan.bytes_redundant)
    )  # type: ignore[return-value]


def _groups(console: Console, plan: ReshardPlan, asked: GenerationLayout) -> None:
    names = {
        "tp": "generation tp groups",
        "pp": "generation pp groups",
        "micro_dp": "micro-dp groups",
    }
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
