"""Writes the reference in docs/configuration.md, below its mark, from the config classes.

python ci/reference.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs

from hybridflow.cli.plugins import spell
from hybridflow.cli.show import render
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.reward import RewardFailureRule
from hybridflow.core.contracts.tokenizer import TokenizerConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.errors import PluginError
from hybridflow.core.job import sections
from hybridflow.core.job.sections import EnvironmentSection, SyncConfig
from hybridflow.core.plugins import registry
from hybridflow.core.values.model import ModelConfig
from hybridflow.settle.config.field_docs import field_docs
from hybridflow.settle.config.structure import describe
from hybridflow.settle.reader import device_defaults
from hybridflow.settle.schema import SamplingSection

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
MARK = "<!-- What follows is written by ci/reference.py. -->\n"
SPECIAL = re.compile(r"([*<\\])")


def page() -> str:
    """The whole page: what is written by hand, and the reference."""
    return PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(reference()) + "\n"


def reference() -> Iterator[str]:
    yield "## Reference\n"
    yield "Each setting with what it takes, its default, and what it means. Settings of plugins that are not ours are"
    yield "printed by `hybridflow show CONFIG --docs`.\n"
    yield from section("[run]", sections.RunSection, "run")
    yield "### [runtime]\n"
    yield f'* `runtime.name` (a plugin of kind runtime; `"{registry().default("runtime")}"`): What starts processes.\n'
    yield from plugins("runtime", "runtime")
    yield "### [pools]\n"
    yield (
        "* `pools.NAME` (a list of integers; `main = [1]`): Devices per node: `[8, 8]` is two nodes with eight each. "
        '`{ devices = [4], device = "cpu" }` is a pool of reward functions, on the CPUs of whatever machine.'
    )
    yield "  One process runs per device. A whole number `n` is `[n]`.\n"
    yield from section("[data]", DataConfig, "data")
    yield from section("[tokenizer]", TokenizerConfig, "tokenizer")
    yield from section("[sampling]", SamplingSection, "sampling")
    yield "### [rollout]\n"
    yield f'* `rollout.name` (a plugin of kind rollout_engine; `"{registry().default("rollout_engine")}"`): What generates.\n'
    yield from plugins("rollout_engine", "rollout")
    yield from section("[environment]", EnvironmentSection, "environment")
    yield "### [algorithm]\n"
    yield '* `algorithm.name` (a plugin of kind algorithm, or "package.module:Class"; required): What is learnt, how.\n'
    yield "Settings that several algorithms have come first; where an algorithm has one of them with another default it stands"
    yield "under the algorithm's name too.\n"
    yield from plugins("algorithm", "algorithm")
    yield from section(
        "Roles: [actor], [critic], [ref], [reward], ...", sections.RoleSection, "ROLE"
    )
    yield from section("model", ModelConfig, "ROLE.model", level=4)
    yield from section("layout", sections.LayoutSection, "ROLE.layout", level=4)
    yield from section("generation", sections.GenerationSection, "ROLE.generation", level=4)
    yield from section("sync", SyncConfig, "ROLE.sync", level=4)
    yield from section("optimizer", OptimizerConfig, "ROLE.optimizer", level=4)
    yield from section("parts of a reward", sections.RewardPart, "ROLE.parts", level=4)
    yield from section("failures of a reward", RewardFailureRule, "ROLE.on_failure", level=4)
    yield from plugins("training_backend", "ROLE.backend")
    yield from section("[validation]", sections.ValidationSection, "validation")
    yield "### Trackers: tables of run.trackers\n"
    yield from plugins("tracker", "TRACKER")
    yield from capabilities()


def section(
    title: str, cls: type, path: str, level: int = 3, told: Sequence[type] = ()
) -> Iterator[str]:
    """A heading, what the class says about itself, and a line per field.

    told: classes whose fields have lines already, under their own headings; a sentence names those that `cls` has.
    """
    yield f"{'#' * level} {title}\n"
    said = re.sub(r"^\[\w+\]: ", "", " ".join((cls.__doc__ or "").split()))
    if said:
        yield escape(said[0].upper() + said[1:]) + "\n"
    inherited = [base for base in cls.__mro__[1:] if base in told]
    if inherited:
        # What another one has already is not named again.
        last = [
            base for base in inherited if not any(base in other.__mro__[1:] for other in inherited)
        ]
        links = ", ".join(f"[{base.__name__}](#{base.__name__.lower()})" for base in last)
        yield f"Also: {links}.\n"
    yield from settings(cls, path, set(inherited))
    yield ""


def settings(cls: type, path: str, told: Set[type] = frozenset()) -> Iterator[str]:
    """A line per field that no class of `told` has; those of a table that may be left out follow it."""
    docs, hints = field_docs(cls), get_type_hints(cls)
    on_cuda = device_defaults(cls, "cuda", {})
    for field in attrs.fields(cls):
        if not field.init or owner(cls, field.name) in told:
            continue
        cuda = f", on CUDA `{render(on_cuda[field.alias])}`" if field.alias in on_cuda else ""
        meaning, key = escape(" ".join(docs.get(field.name, "").split())), f"{path}.{field.alias}"
        yield f"* `{key}` ({takes(field, hints[field.name])}; {default(field)}{cuda})" + (
            f": {meaning}" if meaning else ""
        )
        for inner in get_args(hints[field.name]):
            if field.default is None and attrs.has(inner):
                yield from settings(inner, key)


def owner(cls: type, name: str) -> type:
    """The class that a field of `cls` was declared in last."""
    return next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))


def is_table(cls: type) -> bool:
    """Whether a class declares settings of its own."""
    return attrs.has(cls) and bool(vars(cls).get("__annotations__"))


def plugins(kind: str, path: str) -> Iterator[str]:
    """The settings of our own plugins of a kind; those that several have stand first, once."""
    classes: dict[str, type] = {}
    for entry in registry().entries():
        if entry.kind != kind or entry.package != "hybridflow":
            continue
        try:
            cls = registry().config_class(kind, entry.name)
        except PluginError:  # its requirements are not installed here
            continue
        if cls is not None:
            classes[entry.name] = cls

    # Bases with fields of their own; those that most plugins have come first.
    bases = [base for cls in classes.values() for base in cls.__mro__[1:] if is_table(base)]
    shared = [base for base in dict.fromkeys(bases) if bases.count(base) > 1]
    shared.sort(key=bases.count, reverse=True)
    alone = [base for base in shared if base not in classes.values()]
    for base in alone:
        yield from section(base.__name__, base, path, level=4, told=alone)
    for name, cls in classes.items():
        yield from section(f'{path}.name = "{name}"', cls, path, level=4, told=alone)


def capabilities() -> Iterator[str]:
    """What our own plugins say they can do, as `hybridflow plugins --capabilities` prints it."""
    yield "### What each plugin can do\n"
    yield "| kind | name | can do |\n|---|---|---|"
    for entry in registry().entries():
        if entry.package == "hybridflow" and entry.capabilities and entry.kind != "command":
            yield f"| {entry.kind} | {entry.name} | {spell(entry.capabilities)} |"


def takes(field: attrs.Attribute, hint: Any) -> str:
    choices = getattr(field.validator, "options", None)
    if choices:
        return "one of " + ", ".join(render(choice) for choice in choices)
    return describe(hint)


def default(field: attrs.Attribute) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    value = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default
    if attrs.has(type(value)):
        return "see below"
    return "not set" if value is None else f"`{render(value)}`"


def escape(text: str) -> str:
    """Plain text as Markdown; what is in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page())
