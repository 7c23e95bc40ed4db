"""Resolves a role's model: a Hugging Face folder that is read, or the config that a file gives."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from hybridflow.core.errors import ModelError
from hybridflow.core.job.job import Job
from hybridflow.core.values.model import ModelConfig, ModelSpec


def resolve_model(config: ModelConfig, kind: str, role: str, weights: bool = True) -> ModelSpec:
    """Read a model folder's config.json, or take the config that is given inline.

    Without `weights` the folder needs a config.json, but no weights. Raises ModelError with what
    is missing.
    """
    if (config.path is None) == (config.config is None):
        raise ModelError(
            f"{role}.model needs exactly one of `path` (a Hugging Face folder) and `config` "
            f"(random weights); got {'both' if config.path else 'neither'}"
        )

    # Given inline: the architecture alone, with random weights.
    if config.config is not None:
        if "model_type" not in config.config:
            raise ModelError(
                f"{role}.model.config needs model_type, the name of the architecture as in a "
                "config.json"
            )
        return ModelSpec(dict(config.config), None, config.init_seed, kind)

    # A folder.
    folder = Path(config.path or "")
    if not folder.is_dir():
        raise ModelError(f"{role}.model.path: there is no folder {str(folder)!r}")
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{role}.model.path: {str(folder)!r} has no config.json (it has {names})")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{role}.model.path: {str(folder)!r} has no *.safetensors weights")

    # The config is kept as it is: backends and engines read what they know of it.
    try:
        fields = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{role}.model.path: {folder / 'config.json'} is not JSON: {error}"
        ) from error
    return ModelSpec(fields, str(folder), config.init_seed, kind)


def exported(model: ModelSpec, role: str) -> ModelSpec:
    """Read the model as an earlier stage has exported it; a model of no stage is returned as it is.

    Raises ModelError where the export is missing.
    """
    if model.export is None:
        return model

    # The earlier stage has run by now, so its folder is read like any other.
    config = ModelConfig(path=model.export, init_seed=model.init_seed)
    read = resolve_model(config, model.kind, role)
    return attrs.evolve(read, export=model.export)


def with_exports(job: Job) -> Job:
    """Read the models that earlier stages have exported, into a copy of the job.

    Raises ModelError where an export is missing.
    """
    models = {}
    for name, placed in job.models.items():
        spec = attrs.evolve(placed.spec, model=exported(placed.spec.model, name))
        models[name] = attrs.evolve(placed, spec=spec)
    return attrs.evolve(job, models=models)
