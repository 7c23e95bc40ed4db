"""The mapping of the canonical (Hugging Face) parameters to Megatron's own storage.

Two of a layer's parameters are fused. `linear_qkv` has one key/value head after the other, each
after its queries; `linear_fc1` has the gate, then the up projection. With 4 query heads, 2
key/value heads and tp 2:

    linear_qkv   tp rank 0:  q0 q1 k0 v0         linear_fc1   tp rank 0:  gate[:F/2]  up[:F/2]
                 tp rank 1:  q2 q3 k1 v1                      tp rank 1:  gate[F/2:]  up[F/2:]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.layouts import megatron_layout

Piece = tuple[str, tuple[int, ...], Box, int]
"""(canonical name, its shape, box, position): the box's elements, in row-major order, begin at
`position` in the flat storage of one of Megatron's parameters."""

_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Megatron's name within a layer -> the canonical one, for parameters that are not fused."""


@attrs.frozen
class RoleShape:
    """The canonical parameters of a role's model, and how they are cut."""

    shape: ModelShape
    """Shape of the language model; a value or score model replaces its head."""
    kind: str
    """policy, value or score."""
    layout: ParallelLayout
    """Sizes of dp, tp and pp."""
    virtual_stages: int
    """Chunks of layers per pipeline stage."""
    vocab_multiple: int
    """Each tp rank's part of the vocabulary is padded to a multiple of this."""

    @property
    def padded_vocab(self) -> int:
        """The vocabulary's size rounded up to a multiple of vocab_multiple * tp."""
        multiple = self.vocab_multiple * self.layout.tp
        return -(-self.shape.vocab // multiple) * multiple

    @property
    def ties(self) -> Mapping[str, str]:
        """Tied parameters; a value or score model has none, as its head is its own."""
        return self.shape.ties if self.kind == "policy" else {}

    def params(self, dtype: torch.dtype) -> dict[str, Param]:
        """Return the canonical parameters, with `score.weight` as the head of a non-policy."""
        params = dict(self.shape.params(dtype))
        if self.kind != "policy":
            params.pop("lm_head.weight", None)
            params["score.weight"] = Param((1, self.shape.hidden), dtype)
        return params

    def layout_of(self, dtype: torch.dtype) -> WeightLayout:
        """Return the boxes of each rank as they are in the storage.

        A fused projection has one box per key/value group, since other rows are between two.
        """
        is_policy = self.kind == "policy"
        shape = self.shape if is_policy else attrs.evolve(self.shape, ties={})
        params = self.params(dtype)
        layout = megatron_layout(
            shape, self.layout, params, self.virtual_stages, self.vocab_multiple
        )

        # Layers share one mapping of ranks to boxes, and results computed from it should be shared.
        memo: dict[tuple, Any] = {}
        shards = {}
        for name, held in layout.shards().items():
            rows = self._group_rows(name)
            if rows is None:
                shards[name] = held
                continue
            key = (rows, id(held))
            if key not in memo:
                memo[key] = _by_rows(held, rows)
            shards[name] = memo[key]
        return WeightLayout.by_name(params, shards, range(self.layout.world), self.ties)

    def _group_rows(self, name: str) -> int | None:
        """Return the rows of one key/value group in a fused projection; None for others."""
        for part, heads in (
            ("q_proj", self.shape.heads // self.shape.kv_heads),
            ("k_proj", 1),
            ("v_proj", 1),
        ):
            if f"self_attn.{part}." in name:
                return heads * self.shape.head_dim
        return None

    def pieces(self, name: str, layer: int | None, tp_rank: int) -> Iterator[Piece]:
        """Yield the canonical pieces of one of Megatron's parameters.

        name: without "decoder.layers.N."; layer: index in the whole model, None outside layers.
        Raises KeyError for a parameter that is not known.
        """
        params = self.params(torch.float32)
        shapes = {canonical: param.shape for canonical, param in params.items()}
        if layer is None:
            yield self._outer_piece(name, shapes, tp_rank)
            return

        prefix = f"model.layers.{layer}."
        if "linear_qkv" in name:
            yield from self._fused_heads(prefix, name.rsplit(".", 1)[1], shapes, tp_rank)
        elif "linear_fc1" in name:
            place = 0
            for part in ("gate", "up"):
                canonical = f"{prefix}mlp.{part}_proj.weight"
                box = self._cut(shapes[canonical], 0, tp_rank)
                yield canonical, shapes[canonical], box, place
                place += box.numel
        else:
            # Row-parallel matrices are cut along their inputs; norms are whole on every rank.
            canonical = prefix + _LAYER[name]
            shape = shapes[canonical]
            is_cut = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            box = self._cut(shape, 1, tp_rank) if is_cut else Box.full(shape)
            yield canonical, shape, box, 0

    def _outer_piece(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        tp_rank: int,
    ) -> Piece:
        """Return the piece of a parameter outside the layers; vocabularies are cut by rows."""
        canonical = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "model.embed_tokens.weight" if self.ties else "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "score.weight": "score.weight",
        }[name]
        shape = shapes[canonical]
        box = Box.full(shape)
        if canonical in ("model.embed_tokens.weight", "lm_head.weight"):
            # The last ranks may have padding only: their box is empty.
            size = self.padded_vocab // self.layout.tp
            first = min(tp_rank * size, shape[0])
            last = min((tp_rank + 1) * size, shape[0])
            box = Box.part(shape, 0, first, last)
        return canonical, shape, box, 0

    def _cut(self, shape: tuple[int, ...], dim: int, tp_rank: int) -> Box:
        """Return a tp rank's equal part of a parameter along one dimension."""
        size = shape[dim] // self.layout.tp
        return Box.part(shape, dim, tp_rank * size, (tp_rank + 1) * size)

    def _fused_heads(
        self,
        prefix: str,
        kind: str,
        shapes: Mapping,
        tp_rank: int,
    ) -> Iterator[Piece]:
        """Yield linear_qkv's pieces group by group: its queries' rows, its key's, its value's.

        kind: "weight" or "bias".
        """
        groups = self.shape.kv_heads // self.layout.tp
        place = 0
        for group in range(tp_rank * groups, (tp_rank + 1) * groups):
            for part in ("q", "k", "v"):
                canonical = f"{prefix}self_attn.{part}_proj.{kind}"
                rows = self._group_rows(canonical)
                assert rows is not None
                box = Box.part(shapes[canonical], 0, group * rows, (group + 1) * rows)
                yield canonical, shapes[canonical], box, place
                place += box.numel


def _by_rows(
    held: Mapping[int, Iterable[Box]],
    rows: int,
) -> dict[int, tuple[Box, ...]]:
    """Return each rank's boxes, cut into boxes of at most `rows` rows."""
    return {rank: tuple(_rows(boxes, rows)) for rank, boxes in held.items()}


def _rows(boxes: Iterable[Box], rows: int) -> Iterator[Box]:
    """Cut boxes along their first dimension into boxes of at most `rows` rows."""
    for box in boxes:
        first, *inner_start = box.start
        last, *inner_stop = box.stop
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            yield Box((start, *inner_start), (stop, *inner_stop))


def local_pieces(
    chunks: Iterable[Any], shape: RoleShape, tp_rank: int
) -> Iterator[tuple[torch.nn.Parameter, list[Piece]]]:
    """Yield each of this rank's parameters with its pieces."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            layer = None
            if name.startswith("decoder.layers."):
                # Indices begin at 0 in each chunk; layer_number counts the model's layers from 1.
                _, _, index, name = name.split(".", 3)
                layer = chunk.decoder.layers[int(index)].layer_number - 1
            yield parameter, list(shape.pieces(name, layer, tp_rank))
