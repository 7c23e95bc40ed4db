"""Stages: each has the tables of the file with its own on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.core.config.load import COMMAND_LINE, Provenance, expand, merge
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.job.schema import SECTIONS

STAGE = "stage:"
"""Begins a model.path that means what an earlier stage trained."""
ROLE = ((("model.path", "model.config"), ()), (("function", "parts", "model"), ("options",)))
TOKENIZER = ((("path", "characters", "train"), ()),)
"""Alternatives, and what belongs to them: a stage that gives one of them drops the others of the file, and these."""


def stage_tables(
    tables: Mapping[str, Any], shorthand: frozenset[str]
) -> dict[str | None, dict[str, Any]]:
    """The tables of each stage (its own over the common ones), in order; {None: tables} without stages."""
    stages = tables.get("stages", {})
    if not isinstance(stages, Mapping) or not all(isinstance(s, Mapping) for s in stages.values()):
        raise ConfigError("stages: write one table per stage, for example [stages.warm-up]")
    common = expand({k: v for k, v in tables.items() if k != "stages"}, shorthand)
    if not stages:
        return {None: common}
    return {name: overlay(common, expand(own, shorthand)) for name, own in stages.items()}


def overlay(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's tables over the common ones. Where one excludes the other the stage's counts: a stage that gives
    model.path has no model.config of the file's."""
    base = dict(common)
    for name, table in own.items():
        if not isinstance(table, Mapping) or not isinstance(base.get(name), Mapping):
            continue
        groups = TOKENIZER if name == "tokenizer" else () if name in SECTIONS else ROLE
        for alternatives, theirs in groups:
            if any(_has(table, key) for key in alternatives):
                for key in (*alternatives, *theirs):
                    base[name] = base[name] if _has(table, key) else _without(base[name], key)
    return merge(base, own)


def _has(table: Mapping[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    if first not in table:
        return False
    return not rest or (isinstance(table[first], Mapping) and _has(table[first], rest))


def _without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not _has(table, key):
        return dict(table)
    first, _, rest = key.partition(".")
    if rest:
        return {**table, first: _without(table[first], rest)}
    return {k: v for k, v in table.items() if k != first}


def shadowed_overrides(tables: Mapping[str, Any], provenance: Provenance) -> list[str]:
    """Overrides of the command line that every stage replaces by its own value: they would do nothing."""
    stages = tables.get("stages")
    if not isinstance(stages, Mapping) or not stages:
        return []
    problems = []
    for key, source in provenance.sources.items():
        if source != COMMAND_LINE or key.startswith("stages."):
            continue
        if all(isinstance(own, Mapping) and _has(own, key) for own in stages.values()):
            them = " or ".join(f"stages.{name}.{key}" for name in stages)
            problems.append(
                f"{key}: given on the command line, and every stage has its own, which counts; give {them}"
            )
    return problems


def tokenizer_folder(
    tables: Mapping[str, Any], earlier: Mapping[str, Job | None]
) -> tuple[str | None, bool]:
    """(folder of the models' own tokenizer, whether an earlier stage wrote it): the actor's first."""
    for name in ("actor", "reward", *tables):
        table = tables.get(name)
        model = table.get("model") if isinstance(table, Mapping) else None
        path = model.get("path") if isinstance(model, Mapping) else None
        if not isinstance(path, str):
            continue
        if not path.startswith(STAGE):
            return path, False
        job = earlier.get(path.removeprefix(STAGE).partition("/")[0])
        return (str(Path(job.folder) / "tokenizer"), True) if job else (None, True)
    return None, False
