"""`hybridflow show`: every value of a config as it counts, where it came from, and what follows from all of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from hybridflow.cli.arguments import add_config
from hybridflow.cli.figures import figures, remarks
from hybridflow.core.config.field_docs import field_docs
from hybridflow.core.config.load import DEFAULT, Provenance, read_config
from hybridflow.core.contracts.command import Command
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.job.job import Job, PlacedModel, Rewards
from hybridflow.core.job.placement import resolve_placed
from hybridflow.core.job.roles import REWARD_KEYS, role_table
from hybridflow.core.job.schema import SHORTHAND, RoleSection, SamplingSection
from hybridflow.core.plugins import registry
from hybridflow.kit.console import make_console, print_line, print_table

DERIVED = "derived"
KEPT = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
"""Settings of [sampling] that requests have as they are."""


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
    """One line: a dotted key, its value, where it came from, and the docstring under the field."""

    key: str
    value: Any
    source: str
    doc: str = ""


@attrs.frozen
class Block:
    """The values of one section, or the note why there are none."""

    title: str
    values: tuple[Value, ...] = ()
    note: str = ""


def show(
    path: str | Path,
    overrides: Sequence[str] = (),
    docs: bool = False,
    console: Console | None = None,
) -> None:
    """Print a config. Raises ConfigError with all of its problems, as `run` does; starts nothing."""
    console = console or make_console()
    tables, provenance = read_config(path, overrides, SHORTHAND)
    for job in resolve_placed(tables, Path(path).stem, SHORTHAND, provenance):
        if job.stage:
            print_line(console, f"stage {job.stage}", "bold underline")
            print_line(console)
        for block in blocks(job, provenance):
            _print(console, block, docs)
        print_line(console, "derived", "bold")
        print_table(
            console,
            ("what", "value"),
            [(f"  {name}", text) for name, text in figures(job)],
            header=False,
        )
        print_line(console)
        for remark in remarks(job):
            print_line(console, f"note: {remark}", "yellow")


def _print(console: Console, block: Block, docs: bool) -> None:
    print_line(console, f"{block.title}{': ' if block.note else ''}{block.note}", "bold")
    if block.values:
        rows = [(f"  {v.key}", render(v.value), v.source) for v in block.values]
        meanings = [" ".join(v.doc.split()) for v in block.values] if docs else []
        print_table(console, ("key", "value", "from"), rows, header=False, below=meanings)
    print_line(console)


def render(value: Any) -> str:
    """A value as TOML writes it; - where there is none."""
    if value is None:
        return "-"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(render(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{k} = {render(v)}" for k, v in value.items()) + " }"
            if value
            else "{}"
        )
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def walk(thing: Any, path: str, doc: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, docstring) of the leaves of a config instance or a table; `doc`: of the field it is in."""
    cls: Any = type(thing)
    if attrs.has(cls):
        docs = field_docs(cls)
        inner = [
            (f.alias, getattr(thing, f.name), docs.get(f.name, ""))
            for f in attrs.fields(cls)
            if f.init
        ]
    elif isinstance(thing, Mapping) and thing:
        inner = [(str(key), value, doc) for key, value in thing.items()]
    elif isinstance(thing, list | tuple) and any(
        isinstance(v, Mapping) or attrs.has(type(v)) for v in thing
    ):
        inner = [(str(at), value, doc) for at, value in enumerate(thing)]
    else:
        yield path, thing, doc
        return
    for key, value, text in inner:
        yield from walk(value, f"{path}.{key}", text)


class Sources:
    """Where the values of one job came from: the stage's own tables first, then the common ones."""

    def __init__(self, job: Job, provenance: Provenance):
        self.job, self.provenance = job, provenance

    def of(self, *keys: str) -> str | None:
        """The source of the first of these dotted keys that is given; None when none is."""
        for key in keys:
            if _is_given(self.job.tables, key):
                own = f"stages.{self.job.stage}.{key}"
                found = self.provenance.of(own) if self.job.stage else DEFAULT
                return found if found != DEFAULT else self.provenance.of(key)
        return None

    def values(self, thing: Any, path: str, *places: str) -> Iterator[Value]:
        """The values of a config instance at `path`; `places`: where they may stand too, looked at first."""
        for key, value, doc in walk(thing, path):
            rest = key.removeprefix(path)
            yield Value(
                key, value, self.of(*(place + rest for place in places), key) or DEFAULT, doc
            )

    def plugin(self, path: str, name: str, config: Any) -> Iterator[Value]:
        """The name of a plugin and its settings: those of its own sub-table first, then those of the table."""
        yield Value(f"{path}.name", name, self.of(f"{path}.name") or DEFAULT)
        if config is not None:
            yield from self.values(config, path, f"{path}.{name}")


def _is_given(tables: Mapping[str, Any], key: str) -> bool:
    here: Any = tables
    for part in key.split("."):
        if isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, Mapping) and part in here:
            here = here[part]
        else:
            return False
    return True


def blocks(job: Job, provenance: Provenance) -> list[Block]:
    """The sections of a job in the order of a file, then the roles, then what is not used."""
    sources = Sources(job, provenance)
    of = sources.values
    found = [
        Block("run", tuple(_run(job, of(job.run, "run")))),
        Block("runtime", tuple(sources.plugin("runtime", job.runtime, job.runtime_config))),
        Block("placement", tuple(of(job.placement, "placement"))),
        Block("pools", tuple(_pools(job, sources))),
        Block("data", tuple(of(job.data, "data"))),
        *(Block(name, tuple(of(config, name))) for name, config in job.more_data.items()),
        _tokenizer(job, sources),
        Block("sampling", tuple(of(_sampling(job.sampling), "sampling"))),
        _rollout(job, sources),
        *(
            [Block("environment", tuple(of(job.environment, "environment")))]
            if job.environment
            else []
        ),
        _algorithm(job, sources),
    ]
    for role in job.algorithm.roles():
        placed = job.models.get(role.name) or job.scorers.get(role.name)
        if placed is not None:
            found.append(_role(job, sources, placed))
    shown = {role.name for role in job.algorithm.roles()}
    found += [
        _role(job, sources, scorer) for name, scorer in job.scorers.items() if name not in shown
    ]
    found.append(_validation(job, sources))
    roles = ", ".join(sorted(shown))
    unused = f"unused: algorithm {job.algorithm_name} has the roles {roles}"
    return found + [Block(name, note=unused) for name in job.unused]


def _run(job: Job, values: Iterable[Value]) -> Iterator[Value]:
    for value in values:
        if value.key == "run.name" and value.value is None:
            value = attrs.evolve(value, value=job.name, source=DERIVED)
        yield value


def _pools(job: Job, sources: Sources) -> Iterator[Value]:
    for name, pool in job.pools.items():
        source = sources.of(f"pools.{name}") or DEFAULT
        yield Value(f"pools.{name}", list(pool.devices_per_node), source, "Devices per node.")


def _algorithm(job: Job, sources: Sources) -> Block:
    values = sources.plugin("algorithm", job.algorithm_name, job.algorithm.config)
    others = [
        n
        for n in registry().names("algorithm")
        if isinstance(job.tables["algorithm"].get(n), Mapping)
    ]
    unused = ", ".join(f"[algorithm.{name}]" for name in others if name != job.algorithm_name)
    return Block("algorithm", tuple(values), f"unused: {unused}" if unused else "")


def _rollout(job: Job, sources: Sources) -> Block:
    for model in job.models.values():
        if model.spec.engine is not None:
            values = sources.plugin("rollout", model.spec.engine, model.spec.engine_config)
            return Block("rollout", tuple(values))
    return Block("rollout", note="unused: no role generates")


def _sampling(params: SamplingParams) -> SamplingSection:
    """What a file would say."""
    given = {name: getattr(params, name) for name in KEPT}
    biases = {str(token): bias for token, bias in params.logit_bias}
    return SamplingSection(**given, logit_bias=biases, stop_tokens=params.stop_token_ids)


def _tokenizer(job: Job, sources: Sources) -> Block:
    if job.follows:
        return Block("tokenizer", note=f"the earlier stage's, {job.tokenizer_path}")
    return Block("tokenizer", tuple(sources.values(job.tokenizer, "tokenizer")))


def _role(job: Job, sources: Sources, placed: PlacedModel | Rewards) -> Block:
    """A role's own table; what it inherits is "actor"."""
    name = placed.role.name
    if isinstance(placed, Rewards):
        kept = {
            key: getattr(placed.section, key) for key in REWARD_KEYS if getattr(placed.section, key)
        }
        docs = field_docs(RoleSection)
        values = [
            attrs.evolve(v, doc=docs.get(v.key.split(".")[1], v.doc))
            for v in sources.values(kept, name)
        ]
        return Block(name, tuple(values), "reward")
    hidden = [*REWARD_KEYS, "backend", *([] if placed.role.trained else ["optimizer"])]
    values = [v for v in sources.values(placed.section, name) if v.key.split(".")[1] not in hidden]
    values += sources.plugin(f"{name}.backend", placed.spec.backend, placed.spec.backend_config)
    merged = {name: role_table(job.tables, placed.role)}
    for at, value in enumerate(values):
        inside = value.key.replace(f"{name}.backend", f"{name}.backend.{placed.spec.backend}", 1)
        if value.source == DEFAULT and (_is_given(merged, value.key) or _is_given(merged, inside)):
            values[at] = attrs.evolve(value, source="actor")
        if value.key == f"{name}.layout.dp" and value.value is None:
            values[at] = attrs.evolve(value, value=placed.layout.dp, source=DERIVED)
    trained = "trained" if placed.role.trained else "frozen, so without an optimizer"
    return Block(name, tuple(values), f"{placed.role.kind} model, {trained}")


def _validation(job: Job, sources: Sources) -> Block:
    if job.validation is None:
        return Block("validation", note="none: there is no [validation]")
    values = [
        v
        for v in sources.values(job.validation, "validation")
        if not v.key.startswith("validation.data")
    ]
    for value in sources.values(job.validation_data, "validation.data"):
        if value.key == "validation.data.shuffle":
            value = attrs.evolve(value, source=DERIVED)
        elif value.source == DEFAULT and sources.of(value.key.removeprefix("validation.")):
            value = attrs.evolve(value, source="data")
        values.append(value)
    return Block("validation", tuple(values))
