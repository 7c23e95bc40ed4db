"""Where the canonical (Hugging Face) parameters are in Megatron's own storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.model_shape import ModelShape
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box, Param, WeightLayout
from hybridflow.kit.huggingface.modeling import build_hf_model
from hybridflow.kit.layouts import megatron_layout

Piece = tuple[str, tuple[int, ...], Box, int]
"""(canonical name, its shape, box, place): the box's elements, in row-major order, stand from `place` on in the flat
storage of a parameter of Megatron's."""

_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight", "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}  # fmt: skip


@attrs.frozen
class RoleShape:
    """The canonical parameters of a role's model, and how they are cut."""

    shape: ModelShape
    kind: str
    layout: ParallelLayout
    virtual_stages: int
    vocab_multiple: int

    @property
    def padded_vocab(self) -> int:
        each = self.vocab_multiple * self.layout.tp
        return -(-self.shape.vocab // each) * each

    @property
    def ties(self) -> Mapping[str, str]:
        return self.shape.ties if self.kind == "policy" else {}

    def params(self, dtype: torch.dtype) -> dict[str, Param]:
        found = dict(self.shape.params(dtype))
        if self.kind != "policy":
            found.pop("lm_head.weight", None)
            found["score.weight"] = Param((1, self.shape.hidden), dtype)
        return found

    def layout_of(self, dtype: torch.dtype) -> WeightLayout:
        """Boxes as the storage has them: a key/value head's rows of the fused projection are one box each."""
        whole = self.shape if self.kind == "policy" else attrs.evolve(self.shape, ties={})
        params = self.params(dtype)
        made = megatron_layout(whole, self.layout, params, self.virtual_stages, self.vocab_multiple)
        memo: dict[tuple, Any] = {}
        shards = {}
        for name, held in made.shards().items():
            if (rows := self._group_rows(name)) is None:
                shards[name] = held
                continue
            if (rows, id(held)) not in memo:
                memo[rows, id(held)] = {
                    r: tuple(p for b in boxes for p in _rows(b, rows)) for r, boxes in held.items()
                }
            shards[name] = memo[rows, id(held)]
        return WeightLayout.by_name(params, shards, range(self.layout.world), self.ties)

    def _group_rows(self, name: str) -> int | None:
        """Rows of one key/value group in a projection that is fused."""
        for part, heads in (
            ("q_proj", self.shape.heads // self.shape.kv_heads),
            ("k_proj", 1),
            ("v_proj", 1),
        ):
            if f"self_attn.{part}." in name:
                return heads * self.shape.head_dim
        return None

    def pieces(self, name: str, layer: int | None, tp_rank: int) -> Iterator[Piece]:
        """What is in a parameter of Megatron's. name: without "decoder.layers.N."; layer: of the whole model."""
        shapes = {n: p.shape for n, p in self.params(torch.float32).items()}
        if layer is None:
            canonical = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "output_layer.weight": "model.embed_tokens.weight" if self.ties else "lm_head.weight",
                "decoder.final_layernorm.weight": "model.norm.weight", "score.weight": "score.weight",
            }[name]  # fmt: skip
            shape = shapes[canonical]
            box = Box.full(shape)
            if canonical in ("model.embed_tokens.weight", "lm_head.weight"):
                size = self.padded_vocab // self.layout.tp
                box = Box.part(
                    shape, 0, *(min(edge * size, shape[0]) for edge in (tp_rank, tp_rank + 1))
                )
            yield canonical, shape, box, 0
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
            canonical = prefix + _LAYER[name]
            shape = shapes[canonical]
            cut = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            yield canonical, shape, self._cut(shape, 1, tp_rank) if cut else Box.full(shape), 0

    def _cut(self, shape: tuple[int, ...], dim: int, tp_rank: int) -> Box:
        size = shape[dim] // self.layout.tp
        return Box.part(shape, dim, tp_rank * size, (tp_rank + 1) * size)

    def _fused_heads(
        self, prefix: str, kind: str, shapes: Mapping, tp_rank: int
    ) -> Iterator[Piece]:
        """Group by group: its queries' rows, its key's, its value's."""
        each = self.shape.kv_heads // self.layout.tp
        place = 0
        for group in range(tp_rank * each, (tp_rank + 1) * each):
            for part in ("q", "k", "v"):
                canonical = f"{prefix}self_attn.{part}_proj.{kind}"
                rows = self._group_rows(canonical)
                assert rows is not None
                box = Box.part(shapes[canonical], 0, group * rows, (group + 1) * rows)
                yield canonical, shapes[canonical], box, place
                place += box.numel


def _rows(box: Box, rows: int) -> Iterator[Box]:
    for start in range(box.start[0], box.stop[0], rows):
        yield Box((start, *box.start[1:]), (min(start + rows, box.stop[0]), *box.stop[1:]))


def local_pieces(
    chunks: Iterable[Any], shape: RoleShape, tp_rank: int
) -> Iterator[tuple[torch.nn.Parameter, list[Piece]]]:
    """Each parameter of this rank with what is in it."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            layer = None
            if name.startswith("decoder.layers."):
                _, _, at, name = name.split(".", 3)
                layer = chunk.decoder.layers[int(at)].layer_number - 1
            yield parameter, list(shape.pieces(name, layer, tp_rank))


def fill(parts: Iterable[tuple[str, Box, torch.Tensor]], spec: ModelSpec) -> None:
    """Write the model's first values into (canonical name, box, storage).

    Of a folder only the boxes are read; a head that it lacks, and a model without a folder, are drawn from init_seed as
    Hugging Face draws them. Raises ModelError for a parameter that is not there.
    """
    wanted = list(parts)
    missing = _from_folder(wanted, Path(spec.path)) if spec.path is not None else wanted
    if not missing:
        return
    if spec.path is not None and (strange := {name for name, *_ in missing} - {"score.weight"}):
        raise ModelError(
            f"{spec.path} has no {sorted(strange)[0]}, which this {spec.hf_config.get('model_type')} needs"
        )
    hf, _ = build_hf_model(spec, torch.float32)
    values = dict(hf.named_parameters())
    with torch.no_grad():
        for name, box, storage in missing:
            storage.copy_(values[name][box.slices()].reshape(storage.shape))


def _from_folder(
    wanted: list[tuple[str, Box, torch.Tensor]], folder: Path
) -> list[tuple[str, Box, torch.Tensor]]:
    """What the folder lacks."""
    from safetensors import safe_open

    by_name: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, box, storage in wanted:
        by_name.setdefault(name, []).append((box, storage))
    with torch.no_grad():
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in by_name.keys() & set(tensors.keys()):
                    values = tensors.get_slice(name)
                    for box, storage in by_name.pop(name):
                        storage.copy_(values[box.slices()].reshape(storage.shape))
    return [(name, box, storage) for name, found in by_name.items() for box, storage in found]
