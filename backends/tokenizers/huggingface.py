"""Tokenizers of Hugging Face folders; they and the small ones of `small.py` are one plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""Files of which a folder with a tokenizer has at least one."""


class HFTokenizer(Tokenizer):
    """A Hugging Face folder's tokenizer, read by transformers.

    If a text contains the name of a special token ("<eos>"), it is encoded as that token.
    """

    def __init__(self, hf: Any, where: str):
        """hf: what AutoTokenizer returned. where: its folder, for messages.

        Raises ModelError if there is no eos token. Without a pad token, eos pads.
        """
        self.hf = hf
        self.where = where
        if hf.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {where!r} has no eos token; "
                "set eos_token in its tokenizer_config.json"
            )

        self.bos_id = hf.bos_token_id
        self.eos_id = hf.eos_token_id
        self.pad_id = hf.eos_token_id if hf.pad_token_id is None else hf.pad_token_id
        self.vocab_size = max(hf.get_vocab().values()) + 1  # ids may have gaps

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [T]. Raises DataError."""
        try:
            ids = self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:
            raise DataError(
                f"the tokenizer of {self.where!r} cannot encode {shorten(text)}: {error}"
            ) from error
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of these ids, with spaces as they are."""
        # Padding of the model's vocabulary has ids beyond the tokenizer's.
        numbers = np.asarray(ids, dtype=np.int64).tolist()
        tokens = [token for token in numbers if 0 <= token < self.vocab_size]
        return self.hf.decode(
            tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        complete: bool = False,
    ) -> np.ndarray:
        """Return the ids, int64 [T], of the messages, and of the opening of the assistant's turn.

        Raises DataError if there is no template, or if it refuses the messages.
        """
        if not self.hf.chat_template:
            raise DataError(
                f"data.messages needs a chat template, and the tokenizer of {self.where!r} has "
                "none; use data.prompt, or the tokenizer of a chat model"
            )

        try:
            ids = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=True,
                add_generation_prompt=not complete,
                return_dict=False,
                **(options or {}),
            )
        except Exception as error:  # templates may raise any error
            raise DataError(
                f"the chat template of {self.where!r} refuses {shorten(str(messages))}: {error}"
            ) from error
        return np.asarray(ids, dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        """Write the files of a Hugging Face folder."""
        self.hf.save_pretrained(str(folder))


class HuggingFaceTokenizers(Tokenizers):
    """A plugin of kind "tokenizer", name "huggingface"."""

    def load(self, folder: str, setting: str) -> Tokenizer:
        """Read the tokenizer of a folder (see `load_tokenizer`)."""
        return load_tokenizer(folder, setting)

    def of_characters(self, characters: str) -> Tokenizer:
        """Make a tokenizer with one token per character (see `char_tokenizer`)."""
        return char_tokenizer(characters)

    def train(self, kind: str, vocab_size: int, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """Train a tokenizer (see `train_tokenizer`)."""
        return train_tokenizer(kind, vocab_size, texts)


def load_tokenizer(path: str, name: str = "path") -> Tokenizer:
    """Read the tokenizer of a folder: a small one that a run has saved, or a Hugging Face one.

    name: the setting that gave the path, for messages. Raises ModelError.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{name}: there is no folder {path!r}")

    if not any((folder / file).is_file() for file in FILES):
        names = sorted(entry.name for entry in folder.iterdir())
        listing = ", ".join(names[:8]) or "nothing"
        raise ModelError(
            f"{name}: {path!r} has no tokenizer.json (it has {listing}); copy the tokenizer's "
            "files there, or give tokenizer.path, tokenizer.characters or tokenizer.train"
        )

    # The libraries raise errors of many types for a broken file.
    try:
        small = load_small_tokenizer(folder)
        return HFTokenizer(_auto_tokenizer(path, name), path) if small is None else small
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: the tokenizer in {path!r} cannot be read: {error}") from error


def _auto_tokenizer(path: str, name: str) -> Any:
    """Return what transformers reads from a folder; nothing is downloaded."""
    # Imported late: the small tokenizers work without transformers.
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"{name}: reading the tokenizer of {path!r} needs transformers: "
            "pip install 'hybridflow[transformers]'"
        ) from error
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
