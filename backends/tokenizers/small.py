"""Small tokenizers made for a run: one token per character, or byte-level BPE trained on the run's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import DataError, ModelError
from hybridflow.core.values.text import shorten

SPECIAL = ("<pad>", "<bos>", "<eos>")
"""First tokens, in this order, of the tokenizers made here: ids 0, 1 and 2."""
MARKER = "hybridflow_tokenizer"
"""Key in tokenizer_config.json of an exported folder: made here, and so read back without transformers."""


class SmallTokenizer(Tokenizer):
    """A byte-level tokenizer made for the run (needs only `tokenizers`). Special tokens have no spelling."""

    def __init__(self, fast: Any, kind: str, characters: str | None = None):
        """`fast`: a tokenizers.Tokenizer; `kind`: "char" or "bpe"; `characters`: what a char tokenizer knows."""
        self.fast, self.kind, self.characters = fast, kind, characters
        self._known = None if characters is None else frozenset(characters)
        self.pad_id, self.bos_id, self.eos_id = (fast.token_to_id(token) for token in SPECIAL)
        self.vocab_size = max(fast.get_vocab().values()) + 1
        fast.encode_special_tokens = (
            True  # the characters "<eos>" in a text are characters, not the end
        )

    def __reduce__(self):
        return _unpickle, (self.fast.to_str(), self.kind, self.characters)

    def encode(self, text: str) -> np.ndarray:
        if self._known is not None and not self._known.issuperset(text):
            self._refuse(text)
        return np.asarray(self.fast.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return self.fast.decode(
            np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=skip_special
        )

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        raise DataError(
            f"data.messages needs a chat template, and the run's own {self.kind} tokenizer has none; give "
            "tokenizer.path a tokenizer with one, or use data.prompt"
        )

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # No unk_token: transformers' class for qwen2 would add one of its own, beyond the model's embeddings.
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{
                f"{name}_token": token
                for name, token in zip(("pad", "bos", "eos"), SPECIAL, strict=True)
            },
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            MARKER: {"kind": self.kind, "characters": self.characters},
        }
        self.fast.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(fields, indent=2) + "\n", encoding="utf-8"
        )

    def _refuse(self, text: str) -> None:
        index = next(i for i, c in enumerate(text) if c not in (self._known or ()))
        raise DataError(
            f"the tokenizer does not know {text[index]!r} (character {index} of {shorten(text)}); it knows "
            f"{shorten(self.characters or '', 120)}: add it to tokenizer.characters, or change the data"
        )


def load_small_tokenizer(folder: Path) -> SmallTokenizer | None:
    """What `save` wrote to this folder, or None for a folder that somebody else wrote."""
    file = folder / "tokenizer_config.json"
    ours = json.loads(file.read_text(encoding="utf-8")).get(MARKER) if file.is_file() else None
    if ours is None:
        return None
    fast = _tokenizers().Tokenizer.from_file(str(folder / "tokenizer.json"))
    return SmallTokenizer(fast, ours["kind"], ours["characters"])


def char_tokenizer(characters: str) -> SmallTokenizer:
    """One token per character. Spelled as byte-level BPE, because transformers' class for qwen2 reads only that
    faithfully: an ASCII character is one byte and needs no merge; others are merged from their bytes, and no merge can
    cross a character, since it starts at a UTF-8 lead byte."""
    library = _tokenizers()
    spelled = {c: _byte_symbols(c) for c in characters}
    pieces: dict[str, None] = {}
    merges: list[tuple[str, str]] = []
    for symbols in spelled.values():
        for end in range(1, len(symbols)):
            pieces |= {symbols[:end]: None, symbols[end]: None}
            if (merge := (symbols[:end], symbols[end])) not in merges:
                merges.append(merge)
    tokens = [*SPECIAL, *spelled.values(), *pieces]
    model = library.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    fast = library.Tokenizer(model)
    fast.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = library.decoders.ByteLevel()
    fast.add_special_tokens(list(SPECIAL))
    return SmallTokenizer(fast, "char", characters)


# Qwen2's normaliser and split, so that an exported folder with a qwen2 model, for which transformers puts its own in
# place of those of tokenizer.json, still spells texts like the run did.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(
    kind: str, vocab_size: int, texts: Callable[[], Iterable[str]]
) -> SmallTokenizer:
    """`kind`: "char" (every character of the texts) or "bpe"; `vocab_size`: tokens at most."""
    if kind == "char":
        characters = "".join(sorted(set().union(*texts())))
        if not characters:
            raise DataError(
                'tokenizer.train = "char": the data has no text to take characters from'
            )
        tokenizer = char_tokenizer(characters)
        if tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"the data has {len(characters)} different characters, which take {tokenizer.vocab_size} tokens, and "
                f'tokenizer.vocab_size is {vocab_size}; raise it, or use tokenizer.train = "bpe"'
            )
        return tokenizer
    library = _tokenizers()
    fast = library.Tokenizer(library.models.BPE())
    fast.normalizer = library.normalizers.NFC()
    split = library.pre_tokenizers.Split(library.Regex(_SPLIT), behavior="isolated")
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = library.pre_tokenizers.Sequence([split, level])
    fast.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(texts(), trainer)
    return SmallTokenizer(fast, "bpe")


def _byte_symbols(character: str) -> str:
    """The printable stand-ins that byte-level BPE uses for the bytes of this character."""
    [(symbols, _)] = (
        _tokenizers().pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(character)
    )
    return symbols


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ModelError(
            "tokenizers is not installed: pip install 'hybridflow[transformers]'"
        ) from error
    return tokenizers


def _unpickle(text: str, kind: str, characters: str | None) -> SmallTokenizer:
    return SmallTokenizer(_tokenizers().Tokenizer.from_str(text), kind, characters)
