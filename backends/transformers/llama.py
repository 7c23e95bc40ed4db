"""Weights of Llama-like models in the form that the decoder reads: fused projections, one tensor each."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.backends.transformers.weights import Place
from hybridflow.core.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


@attrs.frozen
class LlamaShape:
    """The numbers of a Llama-like model. h query heads, kv key-value heads, g = h / kv, d the size of a head."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @classmethod
    def of(cls, config) -> LlamaShape:
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
        )

    def part(self, tp: int) -> LlamaShape:
        """What one of `tp` ranks computes. `vocab` stays whole; ranks that share a key-value head have one each."""
        sizes = dict(
            heads=self.heads // tp,
            kv_heads=max(1, self.kv_heads // tp),
            intermediate=self.intermediate // tp,
        )
        return attrs.evolve(self, **sizes)


def unfit(config) -> str | None:
    """Why the fast decoder cannot run a Hugging Face config; None if it can."""
    if config.model_type not in ("llama", "qwen2", "qwen3", "mistral"):
        return f"model_type is {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}"
    if getattr(config, "mlp_bias", False):
        return "the MLP has biases"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some layers use sliding-window attention"
    if config.model_type == "mistral" and config.sliding_window is not None:
        return "it uses sliding-window attention"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"its rotary embedding is {rope['rope_type']!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding covers a part of each head"
    return None


@attrs.define(eq=False)
class Layer:
    """This rank's part of one block; matrices [in, out], for x @ W. H hidden, I intermediate."""

    norm1: torch.Tensor
    qkv: torch.Tensor
    """[H, kv * (g + 2) * d]: per kv head its g query heads, key and value; queries and keys `_interleaved`."""
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    """[h * d, H]"""
    out_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm2: torch.Tensor
    gate_up: torch.Tensor
    """[H, 2 * I]"""
    down: torch.Tensor
    """[I, H]"""


def _interleaved(d: int) -> torch.Tensor:
    """The place of each element of a head: Hugging Face rotates (i, i + d/2) together, we put them side by side.

    A rotation is then one complex product, and attention does not see the order within a head.
    """
    i = torch.arange(d)
    return 2 * (i % (d // 2)) + i // (d // 2)


class LlamaWeights:
    """Empty storage for this rank's part of a model, `places` by canonical name, and the tensors that the decoder reads."""

    def __init__(
        self,
        config,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        split: Split = WHOLE,
    ):
        """`shapes`: every canonical parameter's shape (tied names left out), as Hugging Face saves it."""
        self.split = split
        self.shape = shape = LlamaShape.of(config).part(split.tp)
        self._names, self._dtype, self._device = shapes, dtype, device
        self.places: dict[str, Place] = {}
        kv, g, d = shape.kv_heads, shape.group, shape.head_dim
        base = torch.arange(kv)[:, None, None] * (g + 2) * d
        heads = base + torch.arange(g + 2)[None, :, None] * d
        order = _interleaved(d)
        self._order = order.to(device)
        self._rows = {
            "q_proj": (heads[:, :g] + order).flatten().to(device),
            "k_proj": (heads[:, g : g + 1] + order).flatten().to(device),
            "v_proj": (heads[:, g + 1 :] + torch.arange(d)).flatten().to(device),
        }
        self.embed = self._vocabulary("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(shape.layers)]
        self.norm = self._own("model.norm.weight")
        self.head = (
            self.embed if config.tie_word_embeddings else self._vocabulary("lm_head.weight")
        ).t()
        if unknown := sorted(self.places.keys() ^ shapes.keys()):
            raise ModelError(
                f"the fast decoder does not know the parameters {', '.join(unknown)}; set fast = false"
            )

    def _layer(self, prefix: str) -> Layer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            norm1=self._own(prefix + "input_layernorm.weight"),
            qkv=self._qkv(attention, "weight").t(),
            qkv_bias=self._qkv(attention, "bias"),
            out=self._own(attention + "o_proj.weight").t(),
            out_bias=self._own(attention + "o_proj.bias"),
            q_norm=self._own(attention + "q_norm.weight", self._order),
            k_norm=self._own(attention + "k_norm.weight", self._order),
            norm2=self._own(prefix + "post_attention_layernorm.weight"),
            gate_up=self._gate_up(mlp).t(),
            down=self._own(mlp + "down_proj.weight").t(),
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        """On CPU the memory is that of the transpose: generation is 5 to 10% faster, an update a little slower."""
        if self._device.type == "cpu":
            return self._empty(columns, rows).t()
        return self._empty(rows, columns)

    def _place(self, name: str, storage: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        shape = self._names[name]
        self.places[name] = Place(storage, rows, shape, self.split.box(name, shape))

    def _own(
        self, name: str, rows: torch.Tensor | None = None
    ) -> Any:  # None where the model has no such parameter
        """A parameter with a storage of its own."""
        if name not in self._names:
            return None
        size = self.split.box(name, self._names[name]).shape
        storage = self._matrix(*size) if name.endswith("proj.weight") else self._empty(*size)
        self._place(name, storage, rows)
        return storage

    def _vocabulary(self, name: str) -> Any:
        """Equally many rows on every rank; those behind the end of the vocabulary are never written nor read from."""
        shape = self._names[name]
        storage = self._empty(-(-shape[0] // self.split.tp), *shape[1:])
        self._place(name, storage[: self.split.box(name, shape).shape[0]])
        return storage

    def _qkv(self, attention: str, kind: str) -> Any:
        if f"{attention}q_proj.{kind}" not in self._names:
            return None
        rows = sum(len(index) for index in self._rows.values())
        storage = self._matrix(rows, self.shape.hidden) if kind == "weight" else self._empty(rows)
        for part, index in self._rows.items():
            self._place(f"{attention}{part}.{kind}", storage, index)
        return storage

    def _gate_up(self, mlp: str) -> torch.Tensor:
        size = self.shape.intermediate
        storage = self._matrix(2 * size, self.shape.hidden)
        self._place(mlp + "gate_proj.weight", storage[:size])
        self._place(mlp + "up_proj.weight", storage[size:])
        return storage
