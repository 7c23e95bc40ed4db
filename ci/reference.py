"""Writes the reference in docs/configuration.md, below its mark, from the config classes.

python ci/reference.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs

from hybridflow.cli.plugins import spell
from hybridflow.cli.show import render
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.reward import FailureRule
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
    yield "* `pools.NAME` (a list of integers; `main = [1]`): Devices per node: `[8, 8]` is two nodes with eight each."
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
    yield from section("failures of a reward", FailureRule, "ROLE.on_failure", level=4)
    yield from plugins("training_backend", "ROLE.backend")
    yield from section("[validation]", sections.ValidationSection, "validation")
    yield from capabilities()


def section(title: str, cls: type, path: str, level: int = 3) -> Iterator[str]:
    """A heading, what the class says about itself, and a line per field."""
    yield f"{'#' * level} {title}\n"
    said = re.sub(r"^\[\w+\]: ", "", " ".join((cls.__doc__ or "").split()))
    if said:
        yield escape(said[0].upper() + said[1:]) + "\n"
    yield from settings(cls, path)
    yield ""


def settings(cls: type, path: str) -> Iterator[str]:
    """A line per field; those of a table that may be left out follow it."""
    docs, hints = field_docs(cls), get_type_hints(cls)
    on_cuda = device_defaults(cls, "cuda", {})
    for field in attrs.fields(cls):
        if not field.init:
            continue
        cuda = f", on CUDA `{render(on_cuda[field.alias])}`" if field.alias in on_cuda else ""
        meaning, key = escape(" ".join(docs.get(field.name, "").split())), f"{path}.{field.alias}"
        yield f"* `{key}` ({takes(field, hints[field.name])}; {default(field)}{cuda})" + (
            f": {meaning}" if meaning else ""
        )
        for inner in get_args(hints[field.name]):
            if field.default is None and attrs.has(inner):
                yield from settings(inner, key)


def plugins(kind: str, path: str) -> Iterator[str]:
    """The settings of our own plugins of a kind."""
    for entry in registry().entries():
        if entry.kind != kind or entry.package != "hybridflow":
            continue
        try:
            cls = registry().config_class(kind, entry.name)
        except PluginError:  # its requirements are not installed here
            continue
        if cls is not None:
            yield from section(f'{path}.name = "{entry.name}"', cls, path, level=4)


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
