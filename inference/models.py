"""Which model a user means: a run, its step, its stage, or a Hugging Face folder.

runs/sums                 a run: the model at its end, else its newest checkpoint
runs/sums  --step 40      the checkpoint of step 40
runs/demo/grpo            a stage; runs/demo alone is the stage that ran last
some/folder               a folder with config.json and safetensors files
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ModelError
from hybridflow.core.running.checkpoint import Checkpoints
from hybridflow.core.running.exports import CONFIG, GENERATION, TOKENIZER, export_folder
from hybridflow.core.values.files import (
    BESIDE,
    CHECKPOINTS,
    CONFIG as TABLES,
    DONE,
    EXPORT,
    MARK,
    SETTINGS,
)
from hybridflow.core.values.sealed import read_sealed
from hybridflow.settle.config.load import import_from
from hybridflow.settle.stages import located_model


@attrs.frozen
class FoundModel:
    """Where a model's weights, its tokenizer and its settings are."""

    label: str
    """Its name for people, such as "sums, step 40"."""
    run: Path | None
    """The folder of the run that trained it; None for a folder by itself."""
    step: int | None
    """The step of the run after which the model was saved."""
    model: Mapping[str, Any]
    """The role's table `model`: the model's folder, or its config."""
    checkpoint: Path | None
    """The role's folder in a checkpoint, whose weights come before those of `model`."""
    tokenizer: str | None
    """Folder of its tokenizer, where [tokenizer] of the tables names none."""
    tables: Mapping[str, Any]
    """The tables of the run's config; without a run none."""
    role: str = "actor"
    precision: str | None = None
    """The setting `precision` of the role's training backend in the run."""

    @property
    def role_table(self) -> Mapping[str, Any]:
        """The role's table in the run's config, over the actor's."""
        return _role_table(self.tables, self.role)

    @property
    def stop_tokens(self) -> list[int]:
        """Ids of the stop tokens that the model's folder states."""
        ends = self._generation().get("eos_token_id")
        if ends is None:
            ends = self._config().get("eos_token_id")
        if ends is None:
            return []
        return list(ends) if isinstance(ends, list) else [ends]

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of the folder's generation config, as keys of [sampling]."""
        fields = self._generation()
        names = ("temperature", "top_p", "top_k", "min_p")
        return {name: fields[name] for name in names if fields.get(name) is not None}

    @property
    def positions(self) -> int | None:
        """The largest number of tokens of a prompt with its response, if the folder says it."""
        return self._config().get("max_position_embeddings")

    @property
    def begins_with_bos(self) -> bool:
        """Whether the tokenizer of the model's folder puts a bos token before texts."""
        said = self._file("tokenizer_config.json").get("add_bos_token")
        if said is not None:
            return bool(said)
        processor = self._file(TOKENIZER).get("post_processor") or {}
        templates = processor.get("processors", [processor])
        first = [part["single"][0] for part in templates if part.get("single")]
        return any("SpecialToken" in piece for piece in first)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's folder says how chats are written."""
        path = self.model.get("path")
        if path and (Path(path) / "chat_template.jinja").is_file():
            return True
        return bool(self._file("tokenizer_config.json").get("chat_template"))

    def _config(self) -> Mapping[str, Any]:
        """Return the fields of the model's config."""
        return self._file(CONFIG) if self.model.get("path") else self.model.get("config", {})

    def _generation(self) -> dict[str, Any]:
        """Return the fields of the folder's generation config."""
        return self._file(GENERATION)

    def _file(self, name: str) -> dict[str, Any]:
        """Return the fields of a JSON file in the model's folder; {} where there is none."""
        path = self.model.get("path")
        file = Path(path) / name if path else None
        return json.loads(file.read_text()) if file is not None and file.is_file() else {}


def find_model(
    text: str, step: int | None = None, stage: str | None = None, role: str = "actor"
) -> FoundModel:
    """Return the model that a path means.

    step: of a kept checkpoint; stage: of the run; role: the trained role, for runs with several.
    Raises ModelError, whose message names the runs, steps or roles that exist.
    """
    folder = Path(text)
    if not folder.is_dir():
        raise ModelError(f"{text}: there is no such folder; give a run's, or a Hugging Face one")

    # The folder of a run's export means the run's model, as the run has its settings too.
    run = folder.parent.parent
    if folder.parent.name == EXPORT and (run / MARK).is_file():
        role = folder.name
        folder = run
    if not (folder / MARK).is_file() and (folder / CONFIG).is_file():
        return _folder(folder, step, stage)

    folder = _stage(folder, stage)
    mark = read_sealed(folder / MARK)
    if beside := mark.get(BESIDE):
        import_from(beside)  # the run's rewards, say
    settings = mark.get(SETTINGS) or {}
    found = _of_run(folder, mark[TABLES], step, role)
    return attrs.evolve(found, precision=settings.get(f"{role}.backend.precision"))


def _folder(folder: Path, step: int | None, stage: str | None) -> FoundModel:
    """Return the model of a Hugging Face folder. Raises ModelError if a step or stage is given."""
    for name, given in (("--step", step), ("--stage", stage)):
        if given is not None:
            raise ModelError(
                f"{folder}: {name} {given} is of a run, and this is the folder of a model; "
                "leave it out, or give the run's folder"
            )
    return FoundModel(folder.name, None, None, {"path": str(folder)}, None, str(folder), {})


def _stage(folder: Path, stage: str | None) -> Path:
    """Return the folder of a run without stages, or of the stage: by default the last that ran."""
    if (folder / MARK).is_file():
        if stage is not None and stage != folder.name:
            raise ModelError(f"{folder}: is a run by itself; leave out --stage {stage}")
        return folder
    stages = [path.parent for path in folder.glob(f"*/{MARK}")]
    if not stages:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"{folder}: is neither a run (it has no {MARK}) nor a model (no {CONFIG}); "
            f"it has {names}"
        )
    if stage is None:
        return max(stages, key=lambda path: (path / MARK).stat().st_mtime_ns)
    chosen = [path for path in stages if path.name == stage]
    if not chosen:
        names = ", ".join(sorted(path.name for path in stages))
        raise ModelError(f"{folder}: has no stage {stage!r} (stages: {names})")
    return chosen[0]


def _of_run(folder: Path, tables: Mapping[str, Any], step: int | None, role: str) -> FoundModel:
    """Return a run's model after `step`: an export or a checkpoint."""
    name = _name(folder, tables)
    checkpoints = Checkpoints(folder / CHECKPOINTS, 1)
    kept = [number for number in checkpoints.steps() if (checkpoints.path(number) / role).is_dir()]
    tokenizer = str(folder / "tokenizer") if (folder / "tokenizer").is_dir() else None

    # An export counts while it is that of the run's end: a run may have gone on since.
    export = export_folder(folder, role)
    done = read_sealed(folder / DONE) if (folder / DONE).is_file() else {}
    exported = bool(done.get("exported")) and (export / CONFIG).is_file()
    last = done["step"] if exported else None
    if last is not None and step in (None, last):
        _check_policy(json.loads((export / CONFIG).read_text()), role)
        model = {"path": str(export)}
        label = f"{name}, step {last}"
        return FoundModel(label, folder, last, model, None, str(export), tables, role)

    if step is None and kept:
        step = kept[-1]
    if step not in kept:
        there = [f"step {number}" for number in kept]
        if exported and last not in kept:
            there.append(f"step {last} (exported)")
        wanted = f"step {step}" if step is not None else "a model"
        raise ModelError(
            f"{folder}: {wanted} of role {role!r} is not kept; there is "
            f"{', '.join(there) or 'none'}"
        )
    assert step is not None
    model = located_model(_role_table(tables, role).get("model", {}), folder, role)
    tokenizer = tokenizer or _tokenizer(tables, model)
    if tokenizer is None and tables.get("tokenizer", {}).get("train"):
        raise ModelError(
            f"{folder}: its tokenizer was trained on the run's data, and is saved with an export "
            "alone; hybridflow run CONFIG --resume run.export=true writes both"
        )
    return FoundModel(
        label=f"{name}, step {step}",
        run=folder,
        step=step,
        model=model,
        checkpoint=checkpoints.path(step) / role,
        tokenizer=tokenizer,
        tables=tables,
        role=role,
    )


def _role_table(tables: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return a role's table merged over the actor's; a backend's bare name becomes a table."""
    table = {**tables.get("actor", {}), **tables.get(role, {})}
    if isinstance(table.get("backend"), str):
        table["backend"] = {"name": table["backend"]}
    return table


def _name(folder: Path, tables: Mapping[str, Any]) -> str:
    """Return a run's name for people: its path inside the folder of all runs, if it is there."""
    runs = Path(tables.get("run", {}).get("folder", "runs"))
    try:
        return str(folder.resolve().relative_to(runs.resolve()))
    except ValueError:
        return folder.name


def _check_policy(config: Mapping[str, Any], role: str) -> None:
    """Raise ModelError for the config of a value or score model."""
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures", ())):
        raise ModelError(f"role {role!r} is a value or score model, which generates nothing")


def _tokenizer(tables: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return the folder of the model's tokenizer, unless [tokenizer] says where it comes from."""
    given = tables.get("tokenizer", {})
    if any(given.get(key) for key in ("path", "characters", "train")):
        return None
    return model.get("path")
