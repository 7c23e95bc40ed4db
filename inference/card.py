"""The model card of an exported model: how it was made, without paths and secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.values.files import CHECKPOINTS, DONE, MARK
from hybridflow.core.values.sealed import read_sealed
from hybridflow.inference.models import FoundModel
from hybridflow.settle.config.load import flatten

PRIVATE = ("path", "folder", "address", "key", "secret", "password", "credential", "user", "url")
"""Parts of a setting's name that mark it as private; "token" is matched as a whole word instead."""


def model_card(found: FoundModel, dtype: str) -> str:
    """Return the README.md of an exported model."""
    lines = ["---", "library_name: transformers", "tags: [hybridflow]", "---", ""]
    lines += [f"# {found.label}", ""]
    if found.run is None:
        return "\n".join([*lines, f"Written by hybridflow in {dtype}.", ""])

    mark = read_sealed(found.run / MARK)
    algorithm = found.tables.get("algorithm", {})
    name = algorithm if isinstance(algorithm, str) else algorithm.get("name")
    lines.append(
        f"Role `{found.role}` after step {found.step} of a hybridflow run with the algorithm "
        f"`{name}`, in {dtype}."
    )
    if figures := _validation(found):
        lines += ["", "## Held-out figures", "", "| figure | value |", "| --- | --- |"]
        lines += [f"| {key} | {value:.4g} |" for key, value in sorted(figures.items())]
    lines += ["", "## Settings", "", "| setting | value |", "| --- | --- |"]
    lines += [f"| {key} | `{value!r}` |" for key, value in public(found.tables).items()]
    lines += ["", "## Versions", "", "| package | version |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in mark.get("versions", {}).items()]
    return "\n".join([*lines, ""])


def public(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config without those that may name places, people or secrets."""
    leaves = flatten(tables)
    return {key: value for key, value in leaves.items() if not _private(key, value)}


def _private(key: str, value: Any) -> bool:
    names = key.lower().replace("_", ".").split(".")
    texts = value if isinstance(value, list | tuple) else [value]
    places = any(isinstance(text, str) and ("/" in text or "\\" in text) for text in texts)
    secret = "token" in names or any(part in name for name in names for part in PRIVATE)
    return places or secret


def _validation(found: FoundModel) -> dict[str, float]:
    """Return the metrics of the run's validation after the model's step, if there was one."""
    assert found.run is not None
    done = found.run / DONE
    metrics: dict[str, float] = {}
    if done.is_file():
        metrics = read_sealed(done)["validations"].get(str(found.step), {})
    elif found.checkpoint is not None and found.step is not None:
        checkpoints = Checkpoints(found.run / CHECKPOINTS, 1)
        metrics = checkpoints.read(found.step).validations.get(found.step, {})
    return {key: value for key, value in metrics.items() if not key.endswith("_seconds")}
