"""A model that somebody else can use: a Hugging Face folder with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.running.exports import begin_with_bos, write_special_tokens
from hybridflow.core.running.session import prepare
from hybridflow.inference.card import model_card
from hybridflow.inference.engine import one_device, saved_model
from hybridflow.inference.job import DTYPES, on_one_device, resolve, with_overrides
from hybridflow.inference.models import FoundModel

CARD = "README.md"
ADAPTER = "adapter"
"""The folder of the adapters in a run's own export."""


def export(
    found: FoundModel, out: Path, dtype: str, logs: Path, overrides: Sequence[str] = ()
) -> str:
    """Write the model to `out`, with adapters merged; return the dtype of its weights.

    dtype: "auto" is the dtype in which the run computed, or without a run that of the files. logs:
    the folder for the job's logs.
    """
    job = resolve(with_overrides(on_one_device(found, logs), overrides, found))
    tokenizer = prepare(job, sets={}).tokenizer
    # An export of the run has the dtype already.
    if dtype == "auto" and found.checkpoint is not None:
        dtype = DTYPES.get(str(found.precision), dtype)

    backend = saved_model(job, one_device(job))
    backend.export_hf(out, None if dtype == "auto" else getattr(torch, dtype))
    model = job.models["actor"].spec.model
    tokenizer.save(out)
    if job.data.bos and tokenizer.bos_id is not None:
        begin_with_bos(out, tokenizer.bos_id)
    write_special_tokens(out, model, tokenizer, (*job.sampling.stop_token_ids, tokenizer.eos_id))
    written = json.loads((out / "config.json").read_text())["dtype"]
    (out / CARD).write_text(model_card(found, written))
    return written


def export_adapter(found: FoundModel, out: Path, logs: Path, overrides: Sequence[str] = ()) -> None:
    """Write the adapters that a run trained, without the model that they adapt, and a card.

    Raises ModelError for a model without adapters.
    """
    # At its end a run exports both.
    if found.checkpoint is None:
        folder = Path(found.model["path"]) / ADAPTER
        if not folder.is_dir():
            raise ModelError(_no_adapters(found))
        shutil.copytree(folder, out, dirs_exist_ok=True)
    else:
        job = resolve(with_overrides(on_one_device(found, logs), overrides, found))
        if job.models["actor"].spec.backend_config.lora is None:
            raise ModelError(_no_adapters(found))
        saved: Any = saved_model(job, one_device(job))
        saved.export_adapter(out)
    (out / CARD).write_text(model_card(found, "float32"))


def _no_adapters(found: FoundModel) -> str:
    return (
        f"{found.label}: has no adapters: all its weights were trained (actor.backend.lora trains "
        "adapters); leave out --adapter"
    )
