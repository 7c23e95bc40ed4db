"""`hybridflow reshard`: what it costs to move a model's weights to the rollout engine.

It compares the planned transfers with engines that gather whole parameters first
(arXiv:2409.19256, table 2), for a training layout and a rollout layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console

from hybridflow.cli.explain import print_explained
from hybridflow.cli.gather import gather_plan
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
from hybridflow.core.values.weights import Box, WeightLayout
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.kit.huggingface.shapes import PUBLISHED, read_fields
from hybridflow.kit.layouts import zero3_layout
from hybridflow.kit.planned import AsksLoader, TracedRanks
from hybridflow.settle.config.load import parse_value
from hybridflow.settle.config.structure import structure

SIZES = ("pp", "tp", "dp", "cp", "ep")
"""Names of the sizes that --from may have; --to may have pp and tp."""
SHOWN = 16
"""Number of groups and of ranks that are listed one by one."""


class ReshardCommand(Command):
    """A plugin of kind "command", name "reshard"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--from",
            dest="source",
            required=True,
            metavar="LAYOUT",
            help='"backend=NAME,pp=2,tp=4,dp=2", also cp, ep, order=tp-cp-dp-pp, '
            "and settings of the backend",
        )
        parser.add_argument(
            "--to",
            dest="target",
            required=True,
            metavar="LAYOUT",
            help='"tp=2", also pp, engine=NAME and settings of the engine',
        )
        parser.add_argument("--engine", default="", help="the same as engine=NAME in --to")
        parser.add_argument(
            "--formula",
            action="store_true",
            help="take what the engine holds from a formula, also where its loader can be asked",
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
        reshard(
            a.source,
            f"{a.target},engine={a.engine}" if a.engine else a.target,
            a.model,
            a.dtype,
            a.grouping,
            a.ranks,
            formula=a.formula,
        )
        return 0


@attrs.frozen
class Source:
    """--from: a training layout, and the backend that shards the weights by it."""

    layout: ParallelLayout
    backend: str
    settings: TrainingSettings

    def shape(self, model: str, traced: TracedRanks | None = None) -> ModelShape:
        """Return the shape of the published model `model`, or of the config.json at that path.

        The backend reads the config. If it does not support the architecture, the shape is that of
        the parameters in `traced`, which is enough without tensor, pipeline and expert parallelism.
        Raises ConfigError.
        """
        if model in PUBLISHED:
            return PUBLISHED[model]
        try:
            return self.settings.model_shape(read_fields(model))
        except ConfigError:
            if traced is None or self.layout.tp * self.layout.pp * self.layout.ep > 1:
                raise
            return traced.shape()

    def weights(self, shape: ModelShape, dtype: torch.dtype) -> WeightLayout:
        """Return which part of the weights each rank holds.

        Raises ConfigError for a layout that the backend does not support.
        """
        planned = self.settings.planned_layout(shape, self.layout, dtype)
        if not self.settings.takes(shape, self.layout):
            raise ConfigError(
                f"--from: backend {self.backend} takes no layout {self.layout} of this model; "
                "change its sizes, or name another backend"
            )
        return planned


@attrs.frozen
class Target:
    """--to: the sizes of a rollout engine, and the engine."""

    pp: int
    tp: int
    engine: str
    settings: EngineSettings


def read_table(text: str, option: str) -> dict[str, str]:
    """Parse a text such as "pp=2,tp=4" into a table.

    Raises ConfigError, which names `option`.
    """
    table: dict[str, str] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{option} {text!r}: {part!r} is no key=value")
        table[key] = value
    return table


def _sizes(table: dict[str, str], option: str, keys: Sequence[str]) -> dict[str, int]:
    """Remove these keys from the table and return their numbers. Raises ConfigError."""
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
    """Return the settings of a plugin from the table; None for a plugin without settings.

    `sizes` are the other keys that `option` takes, for the message. Raises ConfigError for unknown
    keys, and PluginError for a plugin that does not load.
    """
    config_class = registry().config_class(kind, name)
    # A plugin without settings takes sizes alone.
    known = [*sizes, *(attrs.fields_dict(config_class) if config_class else ())]
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ConfigError(
            f"{option}: {unknown[0]!r} is neither a size nor a setting of {kind} {name!r}"
            f"{did_you_mean(unknown[0], known)} (there are {', '.join(known)})"
        )

    if not config_class:
        return None
    values = {key: parse_value(value) for key, value in table.items()}
    return structure(values, config_class, option)


def read_source(text: str) -> Source:
    """Return the source that --from names. Raises ConfigError, and PluginError for an unknown
    backend.
    """
    # Sizes, backend and order leave the table; what remains are the backend's settings.
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
            f"--from {text!r}: backend {name} has no {', '.join(lacking)}; its axes are "
            f"{', '.join(sorted(has))}"
        )
    return Source(layout, name, training_settings(config))


def read_target(text: str) -> Target:
    """Return the target that --to names. Raises ConfigError; PluginError for an unknown engine."""
    # Sizes and engine leave the table; what remains are the engine's settings.
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


def ask_loader(
    target: Target, model: str, dtype: torch.dtype, formula: bool
) -> tuple[TracedRanks | None, str]:
    """Return the weights that the engine's own loader reads on each rank, and the source in words.

    None instead of the weights where the loader cannot be asked: for a model without a config.json,
    where the engine is not installed, or with `formula`. Raises ConfigError, and ModelError for a
    model that the engine does not support.
    """
    settings = target.settings
    if not isinstance(settings, AsksLoader):
        return None, f"by the formula; the loader of {target.engine} is not asked"
    if formula:
        return None, "by the formula, as --formula asks"
    if model in PUBLISHED:
        return None, f"by the formula; {model} is a shape without a config.json"
    if (missing := settings.loader_missing()) is not None:
        return None, f"by the formula; {missing}"
    if target.pp > 1:
        return None, f"by the formula; the loader of {target.engine} is asked with pp 1 alone"
    return settings.traced(read_fields(model), target.tp, dtype), "by its own loader"


def reshard(
    source: str,
    target: str,
    model: str,
    dtype: str = "bfloat16",
    grouping: str = "zero-redundancy",
    ranks: bool = False,
    console: Console | None = None,
    formula: bool = False,
) -> None:
    """Print the comparison; `ranks`: also the figures of every rank.

    The engine's weights on each rank are found by its own loader if that can run here, else, and
    with `formula`, by a formula. No weights are read or moved.

    Raises ConfigError for layouts that are not possible.
    """
    # Parse the arguments; an engine with fixed groups decides the grouping.
    console = console or make_console()
    origin = read_source(source)
    wanted = read_target(target)
    weights = getattr(torch, dtype)
    traced, how = ask_loader(wanted, model, weights, formula)
    shape = origin.shape(model, traced)
    layout = origin.layout
    if registry().engine_capabilities(wanted.engine).grouping == "consecutive":
        grouping = "consecutive"
    try:
        asked = generation_layout(layout, wanted.pp, wanted.tp, grouping)
        ordinary = generation_layout(layout, wanted.pp, wanted.tp, "consecutive")
    except ValueError as error:
        raise ConfigError(f"--to {target!r}: {error}") from error

    # The plan of hybridflow sends parts of shards.
    def taken(generation: GenerationLayout) -> WeightLayout:
        if traced is not None:
            return traced.layout(generation, weights)
        return wanted.settings.planned_layout(shape, generation, weights)

    held = origin.weights(shape, weights)
    plan = plan_reshard(held, taken(asked))
    _head(console, model, shape, origin, wanted, asked, weights, how)

    # Engines to compare with gather whole parameters, and have consecutive ranks in their groups.
    everything = zero3_layout(shape.params(weights), layout.world, shape.ties)
    sliced = taken(ordinary)
    over_all = gather_plan(everything, sliced, [list(range(layout.world))])
    over_replica = gather_plan(held, sliced, _replicas(held, layout))
    rows = [
        ("gather over everything", *_worst(over_all)),
        ("gather over a replica, ordinary groups", *_worst(over_replica)),
        (f"planned, {grouping} groups", *_worst(plan)),
    ]
    columns = ("method", "bytes received", "peak memory of weights", "redundant copy")
    print_table(console, columns, rows)
    print_line(console, "each figure: of the worst rank, buckets not counted")
    print_line(console)

    _groups(console, plan, asked)
    if ranks:
        print_line(console)
        print_explained(console, plan, SHOWN)


def _replicas(held: WeightLayout, layout: ParallelLayout) -> list[list[int]]:
    """Return the smallest groups of ranks that hold the whole model together.

    These are the replicas, or all ranks where the weights are sharded over dp too.
    """
    # It is enough to look at one replica: all are sharded alike.
    groups = layout.groups("tp-cp-pp")
    first = set(groups[0])
    for name, shards in held.shards().items():
        boxes: set[Box] = set()
        for rank, own in shards.items():
            if rank in first:
                boxes.update(own)
        if sum(box.numel for box in boxes) < held.params[name].numel:
            return layout.groups("tp-cp-pp-dp")
    return groups


def _head(
    console: Console,
    model: str,
    shape: ModelShape,
    source: Source,
    target: Target,
    asked: GenerationLayout,
    dtype: torch.dtype,
    how: str,
) -> None:
    """Print the model's size, the two layouts, and how the engine's layout was found."""
    total = sum(param.numel for param in shape.params().values())
    layout = source.layout
    print_line(
        console,
        f"{model}: {total / 1e9:.2f} billion parameters, {amount(total * dtype.itemsize)} in "
        f"{str(dtype).removeprefix('torch.')}",
    )
    print_line(
        console,
        f"from {source.backend} {layout} ({layout.world} ranks, {layout.order}) to "
        f"{len(asked.replicas)} replicas of {target.engine} pp {asked.pp} x tp {asked.tp}",
    )
    print_line(console, f"what {target.engine} takes: {how}")
    print_line(console)


def _worst(plan: ReshardPlan) -> tuple[str, str, str]:
    """Return the largest bytes received, peak bytes and redundant bytes of a rank, as text."""
    return (
        amount(max(plan.bytes_received.values())),
        amount(max(plan.peak_bytes.values())),
        amount(max(plan.bytes_redundant.values())),
    )


def _groups(console: Console, plan: ReshardPlan, asked: GenerationLayout) -> None:
    """Print the process groups of generation, and from whom each rank receives."""
    names = {
        "tp": "generation tp groups",
        "pp": "generation pp groups",
        "micro_dp": "micro-dp groups",
    }
    # Groups of one rank are not listed.
    for kind, name in names.items():
        groups = asked.groups(kind)
        if all(len(group) == 1 for group in groups):
            continue
        shown = " ".join(str(group).replace(" ", "") for group in groups[:SHOWN])
        print_line(console, f"{name:<22}{shown}{' ...' if len(groups) > SHOWN else ''}")
    print_line(console)

    # Which ranks send to which.
    senders = talkers(plan)
    for rank in plan.ranks[:SHOWN]:
        runs = _runs(sorted(senders.get(rank, ())))
        print_line(console, f"rank {rank} receives from {runs}")
    if len(plan.ranks) > SHOWN:
        print_line(console, f"... and {len(plan.ranks) - SHOWN} ranks more")


def talkers(plan: ReshardPlan) -> dict[int, set[int]]:
    """Return, for each rank that receives, the ranks that send to it."""
    senders: dict[int, set[int]] = {}
    for flow in plan.flows:
        for sender, receiver in flow.pairs():
            senders.setdefault(receiver, set()).add(sender)
    return senders


def _runs(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, consecutive ones as a range: "0-3, 7"."""
    # [first, last] of each range.
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts) or "nobody"
