"""Registers the built-in tokenizers."""

from __future__ import annotations

from hybridflow.core.plugins import Descriptor, hookimpl


@hookimpl
def hybridflow_plugins() -> list[Descriptor]:
    """Describe the tokenizers of Hugging Face folders, which are the default ones."""
    return [
        Descriptor(
            "tokenizer",
            "huggingface",
            "hybridflow.backends.tokenizers.huggingface:HuggingFaceTokenizers",
            requires=("tokenizers",),
            extra="transformers",
            default=True,
        )
    ]
