"""The tokenizers that stand where a configuration names none."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.tokenizers import plugin
from hybridflow.backends.tokenizers.huggingface import HuggingFaceTokenizers


def test_the_tokenizers_are_brought_under_their_name():
    check_brought(plugin, huggingface=HuggingFaceTokenizers)
