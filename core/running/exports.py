"""Writes the ids of special tokens into an exported folder: those that begin, end and pad texts.

Training backends write the weights and config.json; the tokenizer writes its own files. Without the
tokenizer's ids in config.json and generation_config.json, `generate()` of transformers would not
end where the run's responses did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.values.files import EXPORT
from hybridflow.core.values.model import ModelSpec

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"


def export_folder(folder: Path, role: str) -> Path:
    """Return the folder into which a trained role is exported, in the run's folder."""
    return folder / EXPORT / role


def write_special_tokens(
    folder: Path, model: ModelSpec, tokenizer: Tokenizer, stop_ids: Sequence[int]
) -> None:
    """Write the special tokens' ids into an exported folder's config and generation config.

    `stop_ids` are the tokens at which responses stopped in training. Other fields of the generation
    config in the model's own folder (its temperature, say) are kept.
    """
    config = _read(folder / CONFIG)
    config |= _ids(config, tokenizer)
    _write(folder / CONFIG, config)
    if model.kind != "policy":
        return

    # Backends need not export the generation config of the model's folder.
    generation = _read(folder / GENERATION)
    if model.path is not None:
        generation |= _read(Path(model.path) / GENERATION)
    generation |= _ids(generation, tokenizer)
    generation.setdefault("pad_token_id", tokenizer.pad_id)

    # transformers takes a list where several tokens end a text.
    ends = _as_list(generation["eos_token_id"])
    ends += [token for token in dict.fromkeys(stop_ids) if token not in ends]
    generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    _write(folder / GENERATION, generation)


def begin_with_bos(folder: Path, bos_id: int) -> None:
    """Make the exported tokenizer begin every text with bos, as in training (data.bos).

    A tokenizer that adds tokens around texts already is not changed, nor one without
    tokenizer.json.
    """
    fields = _read(folder / TOKENIZER)
    tokens = [token["content"] for token in fields.get("added_tokens", ()) if token["id"] == bos_id]
    if not tokens or fields.get("post_processor") is not None:
        return

    # The form of `tokenizers`' TemplateProcessing, for one text and for a pair.
    bos = tokens[0]
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": text, "type_id": 0}} for text in "AB")
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
    _write(folder / TOKENIZER, fields)


def _ids(fields: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the special tokens' ids that are missing in a config, or differ in it."""
    ids: dict[str, Any] = {}
    # A model may have several end tokens, the tokenizer's among them.
    if tokenizer.eos_id not in _as_list(fields.get("eos_token_id")):
        ids["eos_token_id"] = tokenizer.eos_id
    if tokenizer.bos_id is not None:
        ids["bos_token_id"] = tokenizer.bos_id
    # A tokenizer without a pad token pads with its eos, which a scoring model must not skip.
    if tokenizer.pad_id != tokenizer.eos_id:
        ids["pad_token_id"] = tokenizer.pad_id
    return ids


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _write(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n")
