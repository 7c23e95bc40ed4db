"""Tokenizers of Hugging Face folders, and the small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.backends.tokenizers.small import (
    char_tokenizer,
    load_small_tokenizer,
    train_tokenizer,
)
from hybridflow.core.contracts.tokenizer import Tokenizer, Tokenizers
from hybridflow.core.errors import DataError, ModelError
from hybridflow.core.values.text import shorten


class HFTokenizer(Tokenizer):
    """A Hugging Face folder's tokenizer, read by transformers. Special tokens spelled in a text are special tokens."""

    def __init__(self, hf: Any, where: str):
        """`hf`: what AutoTokenizer returned; `where`: its folder, for messages."""
        self.hf, self.where = hf, where
        if hf.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {where!r} has no eos token; set eos_token in its tokenizer_config.json"
            )
        self.bos_id, self.eos_id = hf.bos_token_id, hf.eos_token_id
        self.pad_id = hf.eos_token_id if hf.pad_token_id is None else hf.pad_token_id
        self.vocab_size = max(hf.get_vocab().values()) + 1

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:
            raise DataError(
                f"the tokenizer of {self.where!r} cannot encode {shorten(text)}: {error}"
            ) from error
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        ids = [i for i in np.asarray(ids, dtype=np.int64).tolist() if 0 <= i < self.vocab_size]
        return self.hf.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        if not self.hf.chat_template:
            raise DataError(
                f"data.messages needs a chat template, and the tokenizer of {self.where!r} has none; use data.prompt, "
                "or the tokenizer of a chat model"
            )
        try:
            ids = self.hf.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            raise DataError(
                f"the chat template of {self.where!r} refuses {shorten(str(messages))}: {error}"
            ) from error
        return np.asarray(ids, dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        self.hf.save_pretrained(str(folder))


class HuggingFaceTokenizers(Tokenizers):
    """A plugin of kind "tokenizer", name "huggingface"."""

    def load(self, folder: str, setting: str) -> Tokenizer:
        return load_tokenizer(folder, setting)

    def of_characters(self, characters: str) -> Tokenizer:
        return char_tokenizer(characters)

    def train(self, kind: str, vocab_size: int, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        return train_tokenizer(kind, vocab_size, texts)


def load_tokenizer(path: str, name: str = "path") -> Tokenizer:
    """The tokenizer of a folder; `name` says in messages which setting gave it. Raises ModelError."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{name}: there is no folder {path!r}")
    if not any(
        (folder / file).is_file()
        for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"{name}: {path!r} has no tokenizer.json (it has {found}); copy the tokenizer's files there, or give "
            "tokenizer.path, tokenizer.characters or tokenizer.train"
        )
    try:
        if (small := load_small_tokenizer(folder)) is not None:
            return small
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ModelError(
                f"{name}: reading the tokenizer of {path!r} needs transformers: pip install 'hybridflow[transformers]'"
            ) from error
        return HFTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True), path)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: the tokenizer in {path!r} cannot be read: {error}") from error
