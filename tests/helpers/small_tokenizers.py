"""Small tokenizers that several tests read with."""

from __future__ import annotations

from hybridflow.backends.tokenizers.small import char_tokenizer, train_tokenizer

DIGITS = "0123456789+="
TEXTS = [
    "Natalia sold 48/2 = 24 clips in May.\n\nIt's 1,000!",
    "Weng earns $12 an hour; she'd worked 50 minutes.\n",
] * 20


def char(characters=DIGITS):
    return char_tokenizer(characters)


def bpe(vocab_size=320):
    return train_tokenizer("bpe", vocab_size, lambda: TEXTS)
