"""What small configs become, and what is said of them when something is wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from helpers.job_texts import BASE
from hybridflow.core.errors import ConfigError
from hybridflow.core.job.job import Job
from hybridflow.settle.config.load import expand, merge, nest, parse_override
from hybridflow.settle.resolve import resolve_jobs


def jobs(*overrides: str, text: str = BASE) -> list[Job]:
    """The jobs of a config after these overrides."""
    tables = tomllib.loads(text)
    for override in overrides:
        tables = merge(expand(tables), expand(nest(*parse_override(override))))
    return resolve_jobs(tables, "tiny")


def job(*overrides: str, text: str = BASE) -> Job:
    [found] = jobs(*overrides, text=text)
    return found


def problems(*overrides: str, text: str = BASE) -> list[str]:
    """What is wrong with the config after these overrides; fails when nothing is."""
    with pytest.raises(ConfigError) as error:
        jobs(*overrides, text=text)
    return error.value.problems


def problem(*overrides: str, text: str = BASE) -> str:
    found = problems(*overrides, text=text)
    assert len(found) == 1, found
    return found[0]


def model_folder(folder: Path, **fields) -> Path:
    """A Hugging Face folder that can be read, with no weights in it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 16, **fields})
    )
    (folder / "model.safetensors").write_bytes(b"")
    return folder
