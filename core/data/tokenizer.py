"""Text to token ids and back: a model's own Hugging Face tokenizer, or a small one made for the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hybridflow.core.errors import ModelError


@attrs.frozen
class TokenizerConfig:
    """At most one of `path`, `characters` and `train`; with none of them the actor's model folder has the tokenizer."""

    path: str | None = None
    """Folder with a Hugging Face tokenizer."""
    characters: str | None = None
    """A character-level tokenizer of exactly these, after <pad>=0, <bos>=1, <eos>=2. Characters outside ASCII need ids
    for their byte pieces too, which come last."""
    train: str | None = None
    """"char" or "bpe" (byte-level): a tokenizer trained on the texts of the run's data."""
    vocab_size: int = 1024
    """With `train`: tokens at most, special ones included (bpe: at least 259: the 256 bytes and the special ones)."""

    def problems(self) -> list[str]:
        """What is wrong with this configuration, each with what to do."""
        found = []
        given = [name for name in ("path", "characters", "train") if getattr(self, name) is not None]
        if len(given) > 1:
            found.append(f"tokenizer: {' and '.join(given)} are given; keep one of them")
        if self.characters == "":
            found.append('tokenizer.characters is empty; list the characters of your data, for example "0123456789+="')
        if self.characters and len(set(self.characters)) < len(self.characters):
            twice = sorted({c for c in self.characters if self.characters.count(c) > 1})
            found.append(f"tokenizer.characters has {', '.join(map(repr, twice))} more than once; keep one of each")
        if self.train not in (None, "char", "bpe"):
            found.append(f'tokenizer.train is {self.train!r}; it must be "char" or "bpe"')
        if self.train == "bpe" and self.vocab_size < 259:
            found.append(f"tokenizer.vocab_size is {self.vocab_size}; byte-level bpe needs at least 259")
        return found


class Tokenizer(ABC):
    """What the run needs of a tokenizer. Ids are int64 arrays of shape [T]; nothing is ever added on the way in."""

    bos_id: int | None
    eos_id: int
    pad_id: int
    vocab_size: int
    """One more than the largest id."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """int64 [T], without special tokens. Raises DataError for text that cannot be spelled."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """The text of these ids; ids that are no token (padding of the model's vocabulary) give nothing."""

    @abstractmethod
    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        """int64 [T]: the messages and the opening of the assistant's turn. Raises DataError without a template."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the files that transformers' AutoTokenizer loads."""

    def check(self, model_vocab_size: int) -> None:
        """Raise ModelError when there are tokens that the model has no embedding for."""
        if self.vocab_size > model_vocab_size:
            raise ModelError(
                f"the tokenizer's largest id is {self.vocab_size - 1}, but the model has only {model_vocab_size} "
                f"embeddings; set vocab_size = {self.vocab_size} or more in the model's config, or use the tokenizer "
                "that belongs to the model"
            )
