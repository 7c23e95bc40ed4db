"""A role's model: a Hugging Face folder that is read, or the config that a file gives."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from hybridflow.core.errors import ModelError
from hybridflow.core.job.job import Job
from hybridflow.core.values.model import ModelConfig, ModelSpec


def resolve_model(config: ModelConfig, kind: str, role: str, weights: bool = True) -> ModelSpec:
    """Read the model's config.json, or take the inline one. Raises ModelError with what is missing; without `weights` it
    is enough that a folder has a config.json."""
    if (config.path is None) == (config.config is None):
        raise ModelError(
            f"{role}.model needs exactly one of `path` (a Hugging Face folder) and `config` (random weights); "
            f"got {'both' if config.path else 'neither'}"
        )
    if config.config is not None:
        if "model_type" not in config.config:
            raise ModelError(
                f"{role}.model.config needs model_type, the name of the architecture as in a config.json"
            )
        return ModelSpec(dict(config.config), None, config.init_seed, kind)
    folder = Path(config.path or "")
    if not folder.is_dir():
        raise ModelError(f"{role}.model.path: there is no folder {str(folder)!r}")
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{role}.model.path: {str(folder)!r} has no config.json (it has {found})")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{role}.model.path: {str(folder)!r} has no *.safetensors weights")
    try:
        fields = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{role}.model.path: {folder / 'config.json'} is not JSON: {error}"
        ) from error
    return ModelSpec(fields, str(folder), config.init_seed, kind)


def exported(model: ModelSpec, role: str) -> ModelSpec:
    """The model as an earlier stage has written it, where it begins with that. Raises ModelError."""
    if model.export is None:
        return model
    read = resolve_model(
        ModelConfig(path=model.export, init_seed=model.init_seed), model.kind, role
    )
    return attrs.evolve(read, export=model.export)


def with_exports(job: Job) -> Job:
    """The job with the models that earlier stages have written. Raises ModelError."""
    models = {}
    for name, placed in job.models.items():
        spec = attrs.evolve(placed.spec, model=exported(placed.spec.model, name))
        models[name] = attrs.evolve(placed, spec=spec)
    return attrs.evolve(job, models=models)
