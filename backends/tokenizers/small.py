"""Small tokenizers made for a run.

They have one token per character, or are byte-level BPE trained on the run's data. Both are saved
as Hugging Face folders, which transformers reads with the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.core.contracts.tokenizer import Tokenizer
from hybridflow.core.errors import DataError, ModelError
from hybridflow.core.values.text import shorten

SPECIAL = ("<pad>", "<bos>", "<eos>")
"""The special tokens of the tokenizers made here, which come first: ids 0, 1 and 2."""
MARKER = "hybridflow_tokenizer"
"""Key in the tokenizer_config.json of a folder that was saved here. A folder with it is read back
without transformers."""


class SmallTokenizer(Tokenizer):
    """A byte-level tokenizer made for the run; it needs only the library `tokenizers`.

    No text is encoded as a special token.
    """

    def __init__(self, fast: Any, kind: str, characters: str | None = None):
        """fast: a tokenizers.Tokenizer. kind: "char" or "bpe". characters: all that a tokenizer of
        kind "char" knows; None for "bpe"."""
        self.fast = fast
        self.kind = kind
        self.characters = characters
        self._known = None if characters is None else frozenset(characters)
        self.pad_id, self.bos_id, self.eos_id = (fast.token_to_id(token) for token in SPECIAL)
        self.vocab_size = max(fast.get_vocab().values()) + 1

        # The characters "<eos>" in a text are characters, and not the end.
        fast.encode_special_tokens = True

    def __reduce__(self):
        return _unpickle, (self.fast.to_str(), self.kind, self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [T]. Raises DataError for an unknown character."""
        # Checked here, since the library drops unknown characters silently.
        if self._known is not None and not self._known.issuperset(text):
            self._refuse(text)
        return np.asarray(self.fast.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of these ids; ids that are no token add nothing."""
        numbers = np.asarray(ids, dtype=np.int64).tolist()
        return self.fast.decode(numbers, skip_special_tokens=skip_special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        complete: bool = False,
    ) -> np.ndarray:
        """Raise DataError: these tokenizers have no chat template."""
        raise DataError(
            f"data.messages needs a chat template, and the run's own {self.kind} tokenizer has "
            "none; give tokenizer.path a tokenizer with one, or use data.prompt"
        )

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, with MARKER in its config."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        pad, bos, eos = SPECIAL
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "bos_token": bos,
            "eos_token": eos,
            # Without this, transformers' class for qwen2 would add an unk_token of its own, beyond
            # the model's embeddings.
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            MARKER: {"kind": self.kind, "characters": self.characters},
        }

        self.fast.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(fields, indent=2) + "\n", encoding="utf-8"
        )

    def _refuse(self, text: str) -> None:
        """Raise DataError with the first character that is not known."""
        known = self._known or ()
        index = next(i for i, character in enumerate(text) if character not in known)
        raise DataError(
            f"the tokenizer does not know {text[index]!r} (character {index} of {shorten(text)}); "
            f"it knows {shorten(self.characters or '', 120)}: add it to tokenizer.characters, or "
            "change the data"
        )


def load_small_tokenizer(folder: Path) -> SmallTokenizer | None:
    """Return the tokenizer that `SmallTokenizer.save` wrote to this folder.

    None for any other folder.
    """
    file = folder / "tokenizer_config.json"
    mark = json.loads(file.read_text(encoding="utf-8")).get(MARKER) if file.is_file() else None
    if mark is None:
        return None

    fast = _tokenizers().Tokenizer.from_file(str(folder / "tokenizer.json"))
    return SmallTokenizer(fast, mark["kind"], mark["characters"])


def char_tokenizer(characters: str) -> SmallTokenizer:
    """Make a tokenizer with one token per character.

    It is spelled as byte-level BPE, because that is all that transformers' class for qwen2 reads
    faithfully. An ASCII character is one byte and needs no merge. Any other is merged from its
    bytes, one by one from the left; with the bytes (x, y, z):

        merges  x + y -> xy,  xy + z -> xyz      pieces  x, xy, y, z      the character's token  xyz

    No merge crosses into the next character, since that starts at a lead byte of UTF-8.

    Ids: SPECIAL, the characters in their order, then the pieces.
    """
    library = _tokenizers()
    spellings = {character: _byte_symbols(character) for character in characters}
    pieces: dict[str, None] = {}  # used as an ordered set
    merges: list[tuple[str, str]] = []
    for symbols in spellings.values():
        for end in range(1, len(symbols)):
            head = symbols[:end]
            following = symbols[end]
            pieces |= {head: None, following: None}
            if (head, following) not in merges:
                merges.append((head, following))

    # No piece is a character's token too: the lead byte tells how many bytes a character has.
    tokens = [*SPECIAL, *spellings.values(), *pieces]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    fast = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
    fast.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = library.decoders.ByteLevel()
    fast.add_special_tokens(list(SPECIAL))
    return SmallTokenizer(fast, "char", characters)


def train_tokenizer(
    kind: str, vocab_size: int, texts: Callable[[], Iterable[str]]
) -> SmallTokenizer:
    """Train a tokenizer on the texts, with at most `vocab_size` tokens.

    kind: "char" (every character of the texts) or "bpe" (byte-level). Raises DataError if "char"
    finds no characters or too many.
    """
    if kind == "char":
        return _train_characters(vocab_size, texts)
    return _train_bpe(vocab_size, texts)


def _train_characters(vocab_size: int, texts: Callable[[], Iterable[str]]) -> SmallTokenizer:
    characters = "".join(sorted(set().union(*texts())))
    if not characters:
        raise DataError('tokenizer.train = "char": the data has no text to take characters from')

    # Tokens are more than characters: special ones, and pieces of characters beyond ASCII.
    tokenizer = char_tokenizer(characters)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the data has {len(characters)} different characters, which take "
            f"{tokenizer.vocab_size} tokens, and tokenizer.vocab_size is {vocab_size}; raise it, "
            'or use tokenizer.train = "bpe"'
        )
    return tokenizer


# Qwen2's normaliser (NFC) and split. With a qwen2 model in the folder, transformers uses them
# instead of those of tokenizer.json; so an exported folder encodes texts as the run did.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def _train_bpe(vocab_size: int, texts: Callable[[], Iterable[str]]) -> SmallTokenizer:
    # As in Qwen2: NFC, the split into words, then bytes.
    library = _tokenizers()
    fast = library.Tokenizer(library.models.BPE())
    fast.normalizer = library.normalizers.NFC()
    split = library.pre_tokenizers.Split(library.Regex(_SPLIT), behavior="isolated")
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = library.pre_tokenizers.Sequence([split, level])
    fast.decoder = library.decoders.ByteLevel()

    # All 256 bytes have tokens, so that any text can be encoded.
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(texts(), trainer)
    return SmallTokenizer(fast, "bpe")


def _byte_symbols(character: str) -> str:
    """Return the printable stand-ins that byte-level BPE uses for the bytes of this character."""
    level = _tokenizers().pre_tokenizers.ByteLevel(False, use_regex=False)
    # One word, since nothing is split here: [(its symbols, its position)].
    [(symbols, _)] = level.pre_tokenize_str(character)
    return symbols


def _tokenizers() -> Any:
    """Return the library `tokenizers`, imported late since it is an extra."""
    try:
        import tokenizers
    except ImportError as error:
        raise ModelError(
            "tokenizers is not installed: pip install 'hybridflow[transformers]'"
        ) from error
    return tokenizers


def _unpickle(text: str, kind: str, characters: str | None) -> SmallTokenizer:
    return SmallTokenizer(_tokenizers().Tokenizer.from_str(text), kind, characters)
