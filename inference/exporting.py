"""A model that somebody else can use: a Hugging Face folder with a model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from hybridflow.core.running.exports import begin_with_bos, write_special_tokens
from hybridflow.core.running.session import prepare
from hybridflow.inference.card import model_card
from hybridflow.inference.engine import one_device, saved_model
from hybridflow.inference.job import DTYPES, on_one_device, resolve, with_overrides
from hybridflow.inference.models import FoundModel

CARD = "README.md"


def export(
    found: FoundModel, out: Path, dtype: str, logs: Path, overrides: Sequence[str] = ()
) -> str:
    """Write the model to `out`, with adapters merged; return the dtype of its weights.

    dtype: "auto" is that in which the run computed, else that of the files. logs: a folder for
    what the job writes.
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
