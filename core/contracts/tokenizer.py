"""The contract of tokenizers: from text to token ids and back.

A run uses the model's own tokenizer, or a small one that is made for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from hybridflow.core.errors import ConfigError, ModelError


@attrs.frozen
class TokenizerConfig:
    """Where the tokenizer comes from: at most one of `path`, `characters` and `train`.

    With none of them it is the tokenizer in the actor's model folder.
    """

    name: str | None = None
    """Plugin of kind "tokenizer" that reads or makes it. Default: the plugin whose descriptor says
    so."""
    path: str | None = None
    """Folder with a tokenizer."""
    characters: str | None = None
    """Characters of a character-level tokenizer: exactly these, after <pad>=0, <bos>=1, <eos>=2.
    Characters outside ASCII need ids for their byte pieces too, which come last."""
    train: Literal["char", "bpe"] | None = None
    """"char" or "bpe" (byte-level): a tokenizer trained on the texts of the run's data."""
    vocab_size: int = 1024
    """With `train`: largest number of tokens, special ones included (bpe needs at least 259: the
    256 bytes and the special ones)."""

    @property
    def given(self) -> list[str]:
        """Which of the three sources are set."""
        return [name for name in ("path", "characters", "train") if getattr(self, name) is not None]

    def problems(self) -> list[str]:
        """Return the problems of this configuration, each with its remedy."""
        problems = []
        if len(self.given) > 1:
            problems.append(f"tokenizer: {' and '.join(self.given)} are given; keep one of them")

        if self.characters == "":
            problems.append(
                "tokenizer.characters is empty; list the characters of your data, "
                'for example "0123456789+="'
            )
        if self.characters and len(set(self.characters)) < len(self.characters):
            repeated = sorted({c for c in self.characters if self.characters.count(c) > 1})
            problems.append(
                f"tokenizer.characters has {', '.join(map(repr, repeated))} more than once; "
                "keep one of each"
            )

        # Training
        if self.train == "bpe" and self.vocab_size < 259:
            problems.append(
                f"tokenizer.vocab_size is {self.vocab_size}; byte-level bpe needs at least 259"
            )
        return problems


class Tokenizer(ABC):
    """The contract of tokenizers.

    Ids are int64 arrays of shape [T]. `encode` adds no special tokens.
    """

    # --- special tokens and size ---

    bos_id: int | None
    eos_id: int
    pad_id: int
    vocab_size: int
    """One more than the largest id."""

    # --- texts ---

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [T], without special tokens.

        Raises DataError for text that the tokenizer cannot encode.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of these ids.

        Ids that are no token (padding of the model's vocabulary) add nothing.
        """

    @abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        complete: bool = False,
    ) -> np.ndarray:
        """Return the ids, int64 [T], of the messages and the opening of the assistant's turn.

        tools: JSON schemas of the functions that the assistant may call; options: further values
        for the template; complete: the chat ends with the assistant's turn, and no other is opened.
        Raises DataError if the tokenizer has no template.
        """

    # --- models ---

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files next to those of an exported model."""

    def check(self, model_vocab_size: int) -> None:
        """Raise ModelError if the model has fewer embeddings than there are tokens."""
        if self.vocab_size > model_vocab_size:
            raise ModelError(
                f"the tokenizer's largest id is {self.vocab_size - 1}, but the model has only "
                f"{model_vocab_size} embeddings; set vocab_size = {self.vocab_size} or more in the "
                "model's config, or use the tokenizer that belongs to the model"
            )


class Tokenizers(ABC):
    """A plugin of kind "tokenizer": it reads the tokenizers of models, and makes small ones.

    It is constructed without arguments.
    """

    @abstractmethod
    def load(self, folder: str, setting: str) -> Tokenizer:
        """Read the tokenizer of a folder.

        `setting` names, for messages, the setting that the folder comes from. Raises ModelError.
        """

    def of_characters(self, characters: str) -> Tokenizer:
        """Make a tokenizer with one token per character.

        Raises ConfigError where the plugin makes none.
        """
        raise ConfigError(
            f"{type(self).__name__} makes no tokenizer of characters; give tokenizer.path"
        )

    def train(self, kind: str, vocab_size: int, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """Train a tokenizer of kind "char" or "bpe", with at most `vocab_size` tokens, on texts.

        Raises ConfigError where the plugin trains none, and DataError for too little text.
        """
        raise ConfigError(f"{type(self).__name__} trains no tokenizer; give tokenizer.path")
