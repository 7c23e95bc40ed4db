"""Resolves a role's model: a Hugging Face folder that is read, or the config that a file gives."""

from __future__ import annotations

from pathlib import Path

import attrs

from hybridflow.core.errors import ModelError
from hybridflow.core.job.job import Job
from hybridflow.core.values.files import DONE, EXPORT, MARK
from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.core.values.sealed import read_sealed
from hybridflow.core.values.text import parse_json
from hybridflow.settle.config.structure import Invalid, Problem


def resolve_model(config: ModelConfig, kind: str, role: str, weights: bool = True) -> ModelSpec:
    """Return `read_model` of the same arguments. Raises ModelError with everything missing."""
    try:
        return read_model(config, kind, role, weights)
    except Invalid as error:
        raise ModelError("; ".join(map(str, error.inside(f"{role}.model")))) from error


def read_model(config: ModelConfig, kind: str, role: str, weights: bool = True) -> ModelSpec:
    """Read a model folder's config.json, or take the config that is given inline.

    Without `weights` the folder needs a config.json, but no weights. Raises Invalid with everything
    missing, by key of the table `model`.
    """
    if (config.path is None) == (config.config is None):
        raise _invalid(
            "",
            "needs exactly one of `path` (a Hugging Face folder) and `config` (random weights); "
            f"got {'both' if config.path else 'neither'}",
        )

    # Given inline: the architecture alone, with random weights.
    if config.config is not None:
        if "model_type" not in config.config:
            text = "needs model_type, the name of the architecture as in a config.json"
            raise _invalid("config", text)
        return ModelSpec(dict(config.config), None, config.init_seed, kind)

    # A folder.
    folder = Path(model_path(config.path or "", role))
    if not folder.is_dir():
        seen = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise _invalid("path", f"there is no folder {str(folder)!r}{seen}")
    if weights and _is_run(folder):
        raise _invalid("path", _no_export(folder))
    if not (folder / "config.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise _invalid("path", f"{str(folder)!r} has no config.json (it has {names})")
    if weights and not any(folder.glob("*.safetensors")):
        raise _invalid("path", f"{str(folder)!r} has no *.safetensors weights")

    # The config is kept unchanged: backends and engines read the fields that they know.
    try:
        fields = parse_json((folder / "config.json").read_bytes())
    except ValueError as error:
        raise _invalid("path", f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _invalid("path", f"{folder / 'config.json'} holds no fields, but {fields!r:.80}")
    return ModelSpec(fields, str(folder), config.init_seed, kind)


def _invalid(key: str, text: str) -> Invalid:
    return Invalid([Problem(key, text)])


def model_path(path: str, role: str) -> str:
    """Return the Hugging Face folder that a model.path means.

    For the folder of a finished run it is the run's export of this role, else of its actor, or of
    the only role that it trained. Any other path is returned unchanged.
    """
    folder = Path(path)
    done = folder / DONE
    if not _is_run(folder) or not (done.is_file() and read_sealed(done).get("exported")):
        return path
    exports = {export.name: export for export in sorted((folder / EXPORT).glob("*"))}
    chosen = exports.get(role) or exports.get("actor")
    if chosen is None and len(exports) == 1:
        [chosen] = exports.values()
    return path if chosen is None else str(chosen)


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, or of a run with stages."""
    return (folder / MARK).is_file() or any(folder.glob(f"*/{MARK}"))


def _no_export(folder: Path) -> str:
    """Return a message on how to use a run's folder that has no export."""
    stages = sorted(str(mark.parent) for mark in folder.glob(f"*/{MARK}"))
    if stages:
        return f"{str(folder)!r} is a run with stages; give one of them: {', '.join(stages)}"
    return (
        f"{str(folder)!r} is a run that has exported no model of this role, or has not ended yet; "
        f"hybridflow export {folder} --out FOLDER writes that of a checkpoint, and FOLDER is the "
        "path then"
    )


def exported(model: ModelSpec, role: str) -> ModelSpec:
    """Read the model that an earlier stage has exported; any other model is returned unchanged.

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
