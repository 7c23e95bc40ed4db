"""Random layouts: boxes cut anywhere, held by any ranks; and shapes of small models."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st

from helpers.brute import layout, whole
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.weights import Box
from hybridflow.kit.huggingface.shapes import llama_shape

SHAPES = st.lists(
    st.sampled_from([(), (1,), (7,), (12,), (5, 4), (8, 3), (3, 4, 5), (2, 1, 6)]),
    min_size=1,
    max_size=3,
)


@st.composite
def cuts(draw, shape):
    """The parameter in disjoint boxes."""
    boxes = [Box.full(shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[dim], box.stop[dim]))
        low = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
        high = Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
        boxes += [b for b in (low, high) if b.numel]
    return boxes


@st.composite
def layouts(draw):
    """(source, target): random boxes on random ranks; the source holds everything somewhere."""
    shapes = {f"p{i}": s for i, s in enumerate(draw(SHAPES))}
    ranks = range(draw(st.integers(1, 5)))
    first = draw(st.sampled_from([0, 0, len(ranks) - 1, len(ranks)]))  # pools of their own, too
    targets = range(first, first + draw(st.integers(1, 5)))
    have = {r: {} for r in ranks}
    want = {r: {} for r in targets}
    for name, shape in shapes.items():
        pieces = draw(cuts(shape))
        owners = [draw(st.sets(st.sampled_from(list(ranks)), min_size=1)) for _ in pieces]
        for r in ranks:
            mine = [box for box, who in zip(pieces, owners, strict=True) if r in who]
            if draw(st.booleans()) and len(mine) != len(pieces) and draw(st.integers(0, 4)) == 0:
                mine = list(whole(shape))  # overlaps the pieces of others
            have[r][name] = tuple(mine)
        for r in targets:
            parts = draw(cuts(shape))
            want[r][name] = tuple(b for b in parts if draw(st.booleans()))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in range(2)]
    return layout(shapes, have, dtypes[0]), layout(shapes, want, dtypes[1])


HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 32, 4, 8, 2, 4, 48, 209
LLAMA = llama_shape(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB)
"""A vocabulary that no number of ranks divides."""
QWEN = llama_shape(HIDDEN, LAYERS, HEADS, 4, HEAD_DIM, INTERMEDIATE, 211, tied=True, qkv_bias=True)
QWEN3 = llama_shape(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, qk_norm=True)


def counted(shape: ModelShape) -> int:
    """Its parameters; a tied head is none."""
    return sum(prod(sizes) for sizes in shape.parameters().values())
