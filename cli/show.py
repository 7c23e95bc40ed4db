"""`hybridflow show`: every resolved value of a config, its source, and what follows from them.

A source is a file, an override, "default", "derived", or the table that a value is inherited from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from hybridflow.cli.arguments import add_config
from hybridflow.cli.figures import figures
from hybridflow.core.contracts.command import Command
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.job.job import Job, PlacedModel, Rewards
from hybridflow.core.job.sections import RoleSection
from hybridflow.core.plugins import registry
from hybridflow.kit.console import make_console, print_line, print_table
from hybridflow.settle.config.field_docs import field_docs
from hybridflow.settle.config.load import DEFAULT, Provenance, read_config
from hybridflow.settle.placement import resolve_placed
from hybridflow.settle.reader import device_defaults
from hybridflow.settle.remarks import remarks
from hybridflow.settle.roles import REWARD_KEYS, role_table
from hybridflow.settle.schema import SamplingSection

DERIVED = "derived"
"""The source of values that are computed from others."""
KEPT = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
"""Settings of [sampling] that SamplingParams has under the same names."""


class ShowCommand(Command):
    """A plugin of kind "command", name "show"."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        parser.add_argument("--docs", action="store_true", help="say what each setting means")

    def run(self, arguments: argparse.Namespace) -> int:
        show(arguments.config, arguments.overrides, arguments.docs)
        return 0


@attrs.frozen
class Value:
    """One line: a dotted key, its value, its source, and the docstring under the field."""

    key: str
    value: Any
    source: str
    doc: str = ""


@attrs.frozen
class ShownSection:
    """Holds the values of one section and a note on it; either of them may be empty."""

    title: str
    values: tuple[Value, ...] = ()
    note: str = ""


def show(
    path: str | Path,
    overrides: Sequence[str] = (),
    docs: bool = False,
    console: Console | None = None,
) -> None:
    """Print a config, run stage by run stage; starts nothing.

    `docs`: with the meaning of each setting. Raises ConfigError with all problems, as `run` does.
    """
    console = console or make_console()
    tables, provenance = read_config(path, overrides)
    for job in resolve_placed(tables, Path(path).stem, provenance):
        if job.stage:
            print_line(console, f"stage {job.stage}", "bold underline")
            print_line(console)
        for block in blocks(job, provenance):
            _print(console, block, docs)

        # Figures that follow from the settings.
        rows = [(f"  {name}", text) for name, text in figures(job)]
        print_line(console, "derived", "bold")
        print_table(console, ("what", "value"), rows, header=False)
        print_line(console)
        for remark in remarks(job):
            print_line(console, f"note: {remark}", "yellow")


def _print(console: Console, block: ShownSection, docs: bool) -> None:
    """Print a section; with `docs` the meaning of each value below it."""
    print_line(console, f"{block.title}{': ' if block.note else ''}{block.note}", "bold")
    if block.values:
        rows = [(f"  {value.key}", render(value.value), value.source) for value in block.values]
        meanings = []
        if docs:
            meanings = [" ".join(value.doc.split()) for value in block.values]
        print_table(console, ("key", "value", "from"), rows, header=False, below=meanings)
    print_line(console)


def render(value: Any) -> str:
    """Return a value as TOML writes it; "-" for None, which TOML cannot write."""
    if value is None:
        return "-"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(render(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = ", ".join(f"{key} = {render(item)}" for key, item in value.items())
        return f"{{ {items} }}" if value else "{}"
    # JSON and TOML write these alike.
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def walk(thing: Any, path: str, doc: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the leaves of a config instance or a table: dotted key, value and docstring of each.

    `path` is the key of `thing`, `doc` the docstring of the field that it is in.
    """
    # Instances, tables and lists of them have leaves; all else, lists of numbers too, is one.
    cls: Any = type(thing)
    if attrs.has(cls):
        docs = field_docs(cls)
        inner = [
            (field.alias, getattr(thing, field.name), docs.get(field.name, ""))
            for field in attrs.fields(cls)
            if field.init
        ]
    elif isinstance(thing, Mapping) and thing:
        inner = [(str(key), value, doc) for key, value in thing.items()]
    elif isinstance(thing, list | tuple) and any(
        isinstance(value, Mapping) or attrs.has(type(value)) for value in thing
    ):
        inner = [(str(i), value, doc) for i, value in enumerate(thing)]
    else:
        yield path, thing, doc
        return

    for key, value, text in inner:
        yield from walk(value, f"{path}.{key}", text)


class Sources:
    """Finds the sources of one job's values.

    The tables of its run stage come before those that all stages share.
    """

    def __init__(self, job: Job, provenance: Provenance):
        self.job = job
        self.provenance = provenance

    def of(self, *keys: str) -> str | None:
        """Return the source of the first of these dotted keys that is given; None where none is."""
        for key in keys:
            # A run stage's tables are the common ones with its own on top: ask for its own first.
            if _is_given(self.job.tables, key):
                own = f"stages.{self.job.stage}.{key}"
                source = self.provenance.of(own) if self.job.stage else DEFAULT
                return source if source != DEFAULT else self.provenance.of(key)
        return None

    def values(self, thing: Any, path: str, *places: str) -> Iterator[Value]:
        """Yield the values of a config instance at `path`.

        `places` are other dotted keys at which the values may be given, and which come first.
        """
        for key, value, doc in walk(thing, path):
            rest = key.removeprefix(path)
            keys = [place + rest for place in places]
            yield Value(key, value, self.of(*keys, key) or DEFAULT, doc)

    def on_devices(
        self, values: Iterable[Value], path: str, config: Any, hf_config: Mapping[str, Any]
    ) -> Iterator[Value]:
        """Yield the values at `path`, with a note on a plugin's defaults that depend on the device.

        Where run.device is "auto", the note has the other device's default too.
        """
        here = self.job.device
        other = "cpu" if here == "cuda" else "cuda"
        of_device = {
            device: device_defaults(type(config), device, hf_config) for device in (here, other)
        }
        for value in values:
            field = attrs.fields_dict(type(config)).get(value.key.removeprefix(f"{path}."))
            if value.source == DEFAULT and field is not None:
                mine, theirs = (
                    of_device[at].get(field.name, field.default) for at in (here, other)
                )
                if isinstance(mine, attrs.Factory):  # type: ignore[arg-type]
                    mine = theirs = value.value
                if value.value != mine:  # of the run's lengths, say
                    value = attrs.evolve(value, source=DERIVED)
                elif mine != theirs:
                    both = (
                        f"; on {other}: {render(theirs)}" if self.job.run.device == "auto" else ""
                    )
                    value = attrs.evolve(value, source=f"default on {here}{both}")
            yield value

    def plugin(self, path: str, name: str, config: Any) -> Iterator[Value]:
        """Yield the name of a plugin and its settings.

        Settings of its own sub-table come before those of the table at `path`.
        """
        yield Value(f"{path}.name", name, self.of(f"{path}.name") or DEFAULT)
        if config is not None:
            yield from self.values(config, path, f"{path}.{name}")


def _is_given(tables: Mapping[str, Any], key: str) -> bool:
    """Return whether the tables have a value at a dotted key, in which numbers are indices of
    lists.
    """
    here: Any = tables
    for part in key.split("."):
        if isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, Mapping) and part in here:
            here = here[part]
        else:
            return False
    return True


def blocks(job: Job, provenance: Provenance) -> list[ShownSection]:
    """Return a job's sections in the order of a file, then its roles, then unused tables."""
    sources = Sources(job, provenance)
    of = sources.values

    # Sections of every job.
    sections = [
        ShownSection("run", tuple(_run(job, of(job.run, "run")))),
        ShownSection("runtime", tuple(sources.plugin("runtime", job.runtime, job.runtime_config))),
        ShownSection("placement", tuple(of(job.placement, "placement"))),
        ShownSection("pools", tuple(_pools(job, sources))),
        ShownSection("data", tuple(of(job.data, "data"))),
    ]
    for name, config in job.more_data.items():
        sections.append(ShownSection(name, tuple(of(config, name))))
    sections += [
        _tokenizer(job, sources),
        ShownSection("sampling", tuple(of(_sampling(job.sampling), "sampling"))),
        _rollout(job, sources),
    ]
    if job.environment:
        sections.append(ShownSection("environment", tuple(of(job.environment, "environment"))))
    sections.append(_algorithm(job, sources))

    # The algorithm's roles, then other scorers.
    for role in job.algorithm.roles():
        placed = job.models.get(role.name) or job.scorers.get(role.name)
        if placed is not None:
            sections.append(_role(job, sources, placed))
    shown = {role.name for role in job.algorithm.roles()}
    for name, scorer in job.scorers.items():
        if name not in shown:
            sections.append(_role(job, sources, scorer))
    sections.append(_validation(job, sources))

    # Tables of roles that the algorithm does not have.
    roles = ", ".join(sorted(shown))
    unused = f"unused: algorithm {job.algorithm_name} has the roles {roles}"
    return sections + [ShownSection(name, note=unused) for name in job.unused]


def _run(job: Job, values: Iterable[Value]) -> Iterator[Value]:
    """Yield the values of [run]; the name of a run without one comes from its file."""
    for value in values:
        if value.key == "run.name" and value.value is None:
            value = attrs.evolve(value, value=job.name, source=DERIVED)
        yield value


def _pools(job: Job, sources: Sources) -> Iterator[Value]:
    for name, pool in job.pools.items():
        source = sources.of(f"pools.{name}") or DEFAULT
        given: Any = list(pool.devices_per_node)
        if pool.device is not None:
            given = {"devices": given, "device": pool.device}
        yield Value(f"pools.{name}", given, source, "Devices per node.")


def _algorithm(job: Job, sources: Sources) -> ShownSection:
    """Return the algorithm's settings, and a note that names unused tables of other algorithms."""
    # A file may have the tables of several algorithms, to choose from by name.
    values = sources.plugin("algorithm", job.algorithm_name, job.algorithm.config)
    tables = job.tables["algorithm"]
    others = [
        name for name in registry().names("algorithm") if isinstance(tables.get(name), Mapping)
    ]
    unused = ", ".join(f"[algorithm.{name}]" for name in others if name != job.algorithm_name)
    return ShownSection("algorithm", tuple(values), f"unused: {unused}" if unused else "")


def _rollout(job: Job, sources: Sources) -> ShownSection:
    """Return the engine's settings, of the first model that has an engine."""
    for model in job.models.values():
        if model.spec.engine is not None:
            config = model.spec.engine_config
            values = sources.plugin("rollout", model.spec.engine, config)
            values = _chosen(values, job)
            if config is not None:
                fields = model.spec.model.hf_config
                values = sources.on_devices(values, "rollout", config, fields)
            return ShownSection("rollout", tuple(values))
    return ShownSection("rollout", note="unused: no role generates")


def _chosen(values: Iterable[Value], job: Job) -> Iterator[Value]:
    """Yield the values, with a note on an engine that was chosen by the device."""
    other = "cpu" if job.device == "cuda" else "cuda"
    for value in values:
        if value.key == "rollout.name" and value.source == DEFAULT:
            theirs = registry().default("rollout_engine", other)
            if value.value != theirs:
                both = f"; on {other}: {theirs}" if job.run.device == "auto" else ""
                value = attrs.evolve(value, source=f"default on {job.device}{both}")
        yield value


def _sampling(params: SamplingParams) -> SamplingSection:
    """Return the [sampling] table that gives these parameters."""
    given = {name: getattr(params, name) for name in KEPT}
    biases = {str(token): bias for token, bias in params.logit_bias}
    return SamplingSection(**given, logit_bias=biases, stop_tokens=params.stop_token_ids)


def _tokenizer(job: Job, sources: Sources) -> ShownSection:
    if job.follows:
        return ShownSection("tokenizer", note=f"the earlier stage's, {job.tokenizer_path}")
    return ShownSection("tokenizer", tuple(sources.values(job.tokenizer, "tokenizer")))


def _role(job: Job, sources: Sources, placed: PlacedModel | Rewards) -> ShownSection:
    """Return the settings of a role; what it inherits has the source "actor"."""
    if isinstance(placed, Rewards):
        return _scorer(sources, placed)

    # Its section, without what has no effect or follows below, then its backend.
    name = placed.role.name
    hidden = [*REWARD_KEYS, "backend"]
    if not placed.role.trained:
        hidden.append("optimizer")
    every = sources.values(placed.section, name)
    values = [value for value in every if value.key.split(".")[1] not in hidden]
    values += sources.plugin(f"{name}.backend", placed.spec.backend, placed.spec.backend_config)

    # Values that the merged table has, and the role's own has not, come from the actor's.
    merged = {name: role_table(job.tables, placed.role)}
    for i, value in enumerate(values):
        inside = value.key.replace(f"{name}.backend", f"{name}.backend.{placed.spec.backend}", 1)
        if value.source == DEFAULT and (_is_given(merged, value.key) or _is_given(merged, inside)):
            values[i] = attrs.evolve(value, source="actor")
        if value.key == f"{name}.layout.dp" and value.value is None:
            values[i] = attrs.evolve(value, value=placed.layout.dp, source=DERIVED)

    if (config := placed.spec.backend_config) is not None:
        fields = placed.spec.model.hf_config
        values = list(sources.on_devices(values, f"{name}.backend", config, fields))
    state = "trained" if placed.role.trained else "frozen, so without an optimizer"
    return ShownSection(name, tuple(values), f"{placed.role.kind} model, {state}")


def _scorer(sources: Sources, placed: Rewards) -> ShownSection:
    """Return the settings of a role that reward functions fill, without those of models."""
    name = placed.role.name
    # The settings of a role that rewards use and that are set.
    kept = {}
    for key in REWARD_KEYS:
        setting = getattr(placed.section, key)
        if setting:
            kept[key] = setting

    docs = field_docs(RoleSection)
    values = []
    for value in sources.values(kept, name):
        doc = docs.get(value.key.split(".")[1], value.doc)
        values.append(attrs.evolve(value, doc=doc))
    return ShownSection(name, tuple(values), "reward")


def _validation(job: Job, sources: Sources) -> ShownSection:
    """Return the settings of validation; its data inherits from [data] what it does not set."""
    if job.validation is None:
        return ShownSection("validation", note="none: there is no [validation]")

    # Its data was resolved separately, with the values of [data] as defaults.
    every = sources.values(job.validation, "validation")
    values = [value for value in every if not value.key.startswith("validation.data")]
    for value in sources.values(job.validation_data, "validation.data"):
        if value.key == "validation.data.shuffle":
            value = attrs.evolve(value, source=DERIVED)
        elif value.source == DEFAULT and sources.of(value.key.removeprefix("validation.")):
            value = attrs.evolve(value, source="data")
        values.append(value)
    return ShownSection("validation", tuple(values))
