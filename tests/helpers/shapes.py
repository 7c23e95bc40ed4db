"""Shapes of small models, and their parameters counted one by one."""

from __future__ import annotations

from math import prod

from hybridflow.core.values.model_shape import ModelShape
from hybridflow.kit.huggingface.shapes import llama_shape

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 32, 4, 8, 2, 4, 48, 209
LLAMA = llama_shape(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB)
"""A vocabulary that no number of ranks divides."""
QWEN = llama_shape(HIDDEN, LAYERS, HEADS, 4, HEAD_DIM, INTERMEDIATE, 211, tied=True, qkv_bias=True)
QWEN3 = llama_shape(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, qk_norm=True)


def counted(shape: ModelShape) -> int:
    """Its parameters; a tied head is none."""
    return sum(prod(sizes) for sizes in shape.parameters().values())
