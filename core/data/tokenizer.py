"""Text to token ids and back: a model's own Hugging Face tokenizer, or a small one made for the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from hybridflow.core.data.text import shorten
from hybridflow.core.errors import ConfigError, DataError, ModelError


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


class HFTokenizer(Tokenizer):
    """A Hugging Face folder's tokenizer, read by transformers. Special tokens spelled in a text are special tokens."""

    def __init__(self, hf: Any, where: str):
        """`hf`: what AutoTokenizer returned; `where`: its folder, for messages."""
        self.hf, self.where = hf, where
        if hf.eos_token_id is None:
            raise ModelError(f"the tokenizer of {where!r} has no eos token; set eos_token in its tokenizer_config.json")
        self.bos_id, self.eos_id = hf.bos_token_id, hf.eos_token_id
        self.pad_id = hf.eos_token_id if hf.pad_token_id is None else hf.pad_token_id
        self.vocab_size = max(hf.get_vocab().values()) + 1

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:
            raise DataError(f"the tokenizer of {self.where!r} cannot encode {shorten(text)}: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        ids = [i for i in np.asarray(ids, dtype=np.int64).tolist() if 0 <= i < self.vocab_size]
        return self.hf.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

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
            raise DataError(f"the chat template of {self.where!r} refuses {shorten(str(messages))}: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        self.hf.save_pretrained(str(folder))


def build_tokenizer(config: TokenizerConfig, model_path: str | None, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The run's tokenizer. `texts` gives the data's texts and is called only when one is trained.

    Raises ConfigError (contradicting settings), ModelError (no tokenizer in the folder) and DataError (nothing to
    train on).
    """
    from hybridflow.core.data.small_tokenizer import char_tokenizer, train_tokenizer

    if problems := config.problems():
        raise ConfigError(problems)
    if config.characters is not None:
        return char_tokenizer(config.characters)
    if config.train is not None:
        return train_tokenizer(config.train, config.vocab_size, texts)
    if config.path is not None:
        return load_tokenizer(config.path, "tokenizer.path")
    if model_path is not None:
        return load_tokenizer(model_path, "the actor's model.path")
    raise ConfigError(
        "the model has no folder to take a tokenizer from; give tokenizer.path, tokenizer.characters or tokenizer.train"
    )


def load_tokenizer(path: str, name: str = "path") -> Tokenizer:
    """The tokenizer of a folder; `name` says in messages which setting gave it. Raises ModelError."""
    from hybridflow.core.data.small_tokenizer import load_small_tokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{name}: there is no folder {path!r}")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
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
