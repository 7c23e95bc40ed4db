"""The tokenizers that stand where a configuration names none."""

from __future__ import annotations

from helpers.brought import Brought, check_brought

from hybridflow.backends.tokenizers import plugin
from hybridflow.backends.tokenizers.huggingface import HuggingFaceTokenizers


def test_the_default_tokenizers_need_the_tokenizers_library_alone():
    check_brought(
        plugin,
        Brought(
            "tokenizer",
            "huggingface",
            HuggingFaceTokenizers,
            requires=("tokenizers",),
            extra="transformers",
            default=True,
        ),
    )
