"""Run stages: each has the tables of the file, with its own [stages.NAME] on top."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.core.validators import FOLDER_NAME, is_folder_name
from hybridflow.core.values.files import WRITTEN
from hybridflow.settle.config.load import COMMAND_LINE, Provenance, expand, merge
from hybridflow.settle.models import model_path
from hybridflow.settle.schema import SECTIONS

STAGE = "stage:"
"""Prefix of a model.path that means the model of an earlier run stage: "stage:NAME/ROLE"."""
ROLE = ((("model.path", "model.config"), ()), (("function", "parts", "model"), ("options",)))
"""Groups of (alternatives, their companions) in a role's table. Where a stage gives one of the
alternatives, the others and the companions in the file's table are dropped."""
TOKENIZER = ((("path", "characters", "train"), ()),)
"""Such groups for [tokenizer]."""


def stage_tables(tables: Mapping[str, Any]) -> dict[str | None, dict[str, Any]]:
    """Return the tables of each run stage, in order: its own over the common ones.

    Without stages {None: tables}. Raises ConfigError where [stages] is not a table of tables, and
    for names that no folder can have.
    """
    stages = tables.get("stages", {})
    if not isinstance(stages, Mapping) or not all(
        isinstance(own, Mapping) for own in stages.values()
    ):
        raise ConfigError("stages: write one table per stage, for example [stages.warm-up]")

    # Shorthands become tables first: a name and a table would replace each other, not merge.
    common = {name: table for name, table in tables.items() if name != "stages"}
    common = expand(common)
    if not stages:
        return {None: common}
    _check_names(stages)
    return {name: overlay(common, expand(own)) for name, own in stages.items()}


def _check_names(stages: Mapping[str, Any]) -> None:
    """Raise ConfigError for names that no folder of a stage can have."""
    problems = []
    for name in stages:
        if not is_folder_name(name):
            problems.append(f"stages: {name!r} is no name of a stage: it must be {FOLDER_NAME}")
        elif name in WRITTEN:
            problems.append(f"stages.{name}: every run's folder has a {name}; give another name")
    if problems:
        raise ConfigError(problems)


def overlay(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a stage's tables over the common ones.

    Where one setting excludes another, the stage's is used: a stage that gives model.path has no
    model.config from the file.
    """
    base = dict(common)
    for name, table in own.items():
        if not isinstance(table, Mapping) or not isinstance(base.get(name), Mapping):
            continue

        # Tables that are no sections are roles'.
        groups = TOKENIZER if name == "tokenizer" else () if name in SECTIONS else ROLE
        for alternatives, companions in groups:
            if any(_has(table, key) for key in alternatives):
                for key in (*alternatives, *companions):
                    base[name] = base[name] if _has(table, key) else _without(base[name], key)
    return merge(base, own)


def _has(table: Mapping[str, Any], key: str) -> bool:
    """Return whether a table has a dotted key."""
    first, _, rest = key.partition(".")
    if first not in table:
        return False
    return not rest or (isinstance(table[first], Mapping) and _has(table[first], rest))


def _without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Copy a table without a dotted key."""
    if not _has(table, key):
        return dict(table)
    first, _, rest = key.partition(".")
    if rest:
        return {**table, first: _without(table[first], rest)}
    return {name: value for name, value in table.items() if name != first}


def shadowed_overrides(tables: Mapping[str, Any], provenance: Provenance) -> list[str]:
    """List overrides of the command line that do nothing, because every stage has its own value."""
    stages = tables.get("stages")
    if not isinstance(stages, Mapping) or not stages:
        return []

    problems = []
    common = {name: table for name, table in tables.items() if name != "stages"}
    for key, source in provenance.sources.items():
        if source != COMMAND_LINE or key.startswith("stages."):
            continue

        # One stage that takes it, and has no value of its own, is enough to make it useful. A stage
        # with a model.path has no model.config.
        if not any(
            not isinstance(own, Mapping) or (not _has(own, key) and _has(overlay(common, own), key))
            for own in stages.values()
        ):
            keys = " or ".join(f"stages.{name}.{key}" for name in stages)
            problems.append(
                f"{key}: given on the command line, and every stage has its own, which counts; "
                f"give {keys}"
            )
    return problems


def located_model(model: Mapping[str, Any], folder: Path, role: str) -> dict[str, Any]:
    """Return a role's table `model` with its path resolved to a model folder.

    The path may be "stage:NAME/ROLE" or the folder of a run. folder: that of the stage whose role
    it is; those of earlier stages are beside it.
    """
    located = deepcopy(dict(model))
    path = located.get("path")
    if isinstance(path, str) and path.startswith(STAGE):
        stage, _, source = path.removeprefix(STAGE).partition("/")
        exports = folder.parent / stage / "export"
        named = exports / (source or role)
        # Without a role of the same name it is the one that was trained.
        if not source and not named.is_dir() and exports.is_dir():
            named = min(exports.iterdir(), default=named)
        located["path"] = str(named)
    elif isinstance(path, str):
        located["path"] = model_path(path, role)
    return located


def tokenizer_folder(
    tables: Mapping[str, Any], earlier: Mapping[str, Job | None]
) -> tuple[str | None, bool]:
    """Find the models' own tokenizer: (its folder, whether an earlier stage writes it).

    It is that of the first table with a model.path, the actor's before all others. The folder is
    None where no table has one, or where the earlier stage has problems.
    """
    for name in ("actor", "reward", *tables):
        table = tables.get(name)
        # The tables have not been checked yet: each level may be anything.
        model = table.get("model") if isinstance(table, Mapping) else None
        path = model.get("path") if isinstance(model, Mapping) else None
        if not isinstance(path, str):
            continue
        if not path.startswith(STAGE):
            return model_path(path, name), False

        # "stage:NAME/ROLE": a stage writes one tokenizer for all its models.
        job = earlier.get(path.removeprefix(STAGE).partition("/")[0])
        return (str(Path(job.folder) / "tokenizer"), True) if job else (None, True)
    return None, False
