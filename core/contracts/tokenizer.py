"""The contract of tokenizers: text to token ids and back, a model's own or a small one made for the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from hybridflow.core.errors import ConfigError, ModelError


@attrs.frozen
class TokenizerConfig:
    """At most one of `path`, `characters` and `train`; with none of them the actor's model folder has the tokenizer."""

    name: str | None = None
    """A plugin of kind "tokenizer" that reads or makes it; default: the one that says it is."""
    path: str | None = None
    """Folder with a tokenizer."""
    characters: str | None = None
    """A character-level tokenizer of exactly these, after <pad>=0, <bos>=1, <eos>=2. Characters outside ASCII need ids
    for their byte pieces too, which come last."""
    train: Literal["char", "bpe"] | None = None
    """"char" or "bpe" (byte-level): a tokenizer trained on the texts of the run's data."""
    vocab_size: int = 1024
    """With `train`: tokens at most, special ones included (bpe: at least 259: the 256 bytes and the special ones)."""

    @property
    def given(self) -> list[str]:
        """Which of the three are given."""
        return [name for name in ("path", "characters", "train") if getattr(self, name) is not None]

    def problems(self) -> list[str]:
        """What is wrong with this configuration, each with what to do."""
        found = []
        if len(self.given) > 1:
            found.append(f"tokenizer: {' and '.join(self.given)} are given; keep one of them")
        if self.characters == "":
            found.append(
                'tokenizer.characters is empty; list the characters of your data, for example "0123456789+="'
            )
        if self.characters and len(set(self.characters)) < len(self.characters):
            twice = sorted({c for c in self.characters if self.characters.count(c) > 1})
            found.append(
                f"tokenizer.characters has {', '.join(map(repr, twice))} more than once; keep one of each"
            )
        if self.train == "bpe" and self.vocab_size < 259:
            found.append(
                f"tokenizer.vocab_size is {self.vocab_size}; byte-level bpe needs at least 259"
            )
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
        """Write the files that go with an exported model."""

    def check(self, model_vocab_size: int) -> None:
        """Raise ModelError when there are tokens that the model has no embedding for."""
        if self.vocab_size > model_vocab_size:
            raise ModelError(
                f"the tokenizer's largest id is {self.vocab_size - 1}, but the model has only {model_vocab_size} "
                f"embeddings; set vocab_size = {self.vocab_size} or more in the model's config, or use the tokenizer "
                "that belongs to the model"
            )


class Tokenizers(ABC):
    """A plugin of kind "tokenizer": reads tokenizers of models, and makes small ones. One without arguments is made."""

    @abstractmethod
    def load(self, folder: str, setting: str) -> Tokenizer:
        """The tokenizer of a folder; `setting` says in messages what gave it. Raises ModelError."""

    def of_characters(self, characters: str) -> Tokenizer:
        """One token per character. Raises ConfigError where it makes none."""
        raise ConfigError(
            f"{type(self).__name__} makes no tokenizer of characters; give tokenizer.path"
        )

    def train(self, kind: str, vocab_size: int, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """One trained on texts, of at most `vocab_size` tokens. `kind`: "char" or "bpe". Raises ConfigError where it trains
        none, and DataError (nothing to train on)."""
        raise ConfigError(f"{type(self).__name__} trains no tokenizer; give tokenizer.path")
