"""Weights of Llama-like models in the tensors that the fast decoder reads.

Projections that read the same input are fused, one tensor each:

    q_proj, k_proj, v_proj  ->  qkv       per kv head: g query heads, key, value
    gate_proj, up_proj      ->  gate_up   first all of gate, then all of up
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hybridflow.backends.transformers.parallel import WHOLE, Split
from hybridflow.backends.transformers.weights import StoredBox
from hybridflow.core.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


@attrs.frozen
class LlamaShape:
    """The sizes of a Llama-like model, by their letters in the docstrings of this folder."""

    layers: int
    """Number of decoder layers."""
    hidden: int
    """Size of the residual stream, H."""
    intermediate: int
    """Size of the MLP's inner layer, I."""
    heads: int
    """Number of query heads, h."""
    kv_heads: int
    """Number of key-value heads, kv."""
    head_dim: int
    """Size of a head, d."""
    vocab: int
    """Size of the vocabulary, V."""
    eps: float
    """Epsilon of RMSNorm."""

    @property
    def group(self) -> int:
        """Number of query heads per key-value head, g."""
        return self.heads // self.kv_heads

    @classmethod
    def of(cls, config) -> LlamaShape:
        """Return the sizes of a Hugging Face config."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
        )

    def part(self, tp: int) -> LlamaShape:
        """Return the sizes of the part that one of `tp` ranks computes.

        `vocab` stays whole. Ranks that share a key-value head have one each.
        """
        return attrs.evolve(
            self,
            heads=self.heads // tp,
            kv_heads=max(1, self.kv_heads // tp),
            intermediate=self.intermediate // tp,
        )


def unfit(config) -> str | None:
    """Return why the fast decoder cannot run a Hugging Face config; None if it can."""
    # The architecture
    if config.model_type not in ("llama", "qwen2", "qwen3", "mistral"):
        return f"model_type is {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}"
    if getattr(config, "mlp_bias", False):
        return "the MLP has biases"

    # Attention to a part of the context
    layer_types = getattr(config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in layer_types):
        return "some layers use sliding-window attention"
    if config.model_type == "mistral" and config.sliding_window is not None:
        return "it uses sliding-window attention"

    # Rotary embeddings
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return f"its rotary embedding is {rope['rope_type']!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding covers a part of each head"
    return None


@attrs.define(eq=False)
class Layer:
    """This rank's part of one block. Matrices are [in, out], for x @ W."""

    norm1: torch.Tensor
    """Weight of the norm before attention, [H]."""
    qkv: torch.Tensor
    """Fused projection [H, kv * (g + 2) * d]: per kv head its g query heads, key and value; queries
    and keys are `_interleaved`."""
    qkv_bias: torch.Tensor | None
    """Bias of it, [kv * (g + 2) * d]."""
    out: torch.Tensor
    """Output projection of attention, [h * d, H]."""
    out_bias: torch.Tensor | None
    """Bias of it, [H]."""
    q_norm: torch.Tensor | None
    """Weight of the norm of each query head (qwen3), [d], `_interleaved`."""
    k_norm: torch.Tensor | None
    """Weight of the norm of each key (qwen3), [d], `_interleaved`."""
    norm2: torch.Tensor
    """Weight of the norm before the MLP, [H]."""
    gate_up: torch.Tensor
    """Fused projection into the MLP, [H, 2 * I]."""
    down: torch.Tensor
    """Projection out of the MLP, [I, H]."""


def _interleaved(d: int) -> torch.Tensor:
    """Return the position of each element of a head, int64 [d]; `d` is even.

    Hugging Face rotates elements i and i + d/2 together; here they are neighbours: i is at position
    2 i, and i + d/2 at 2 i + 1. A rotation is then one complex product, and attention does not
    depend on the order within a head.
    """
    element = torch.arange(d)
    half = d // 2
    return 2 * (element % half) + element // half


class LlamaWeights:
    """Empty storage for this rank's part of a model, in tensors that the decoder reads."""

    shape: LlamaShape
    """Sizes of this rank's part."""
    places: dict[str, StoredBox]
    """Canonical name -> the storage of this rank's box of the parameter."""
    embed: torch.Tensor
    """Embedding of this rank's part of the vocabulary, [V / tp, H]."""
    layers: list[Layer]
    """This rank's part of each block."""
    norm: torch.Tensor
    """Weight of the last norm, [H]."""
    head: torch.Tensor
    """Output matrix of this rank's part of the vocabulary, [H, V / tp]."""

    _names: dict[str, tuple[int, ...]]
    """Canonical name -> shape of the whole parameter."""
    _order: torch.Tensor
    """Positions of the elements of a head (see `_interleaved`), int64 [d]."""
    _rows: dict[str, torch.Tensor]
    """Row of the fused projection for each row of q_proj, k_proj and v_proj."""

    def __init__(
        self,
        config,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        split: Split = WHOLE,
    ):
        """Allocate the storage.

        `shapes` has every canonical parameter's shape (tied names left out), as Hugging Face saves
        it. Raises ModelError for names that are no part of a Llama-like model.
        """
        self.split = split
        self.shape = LlamaShape.of(config).part(split.tp)
        self.places = {}
        self._names = shapes
        self._dtype = dtype
        self._device = device
        self._number_rows()

        # Allocating a tensor also notes the places of its parameters in `places`.
        self.embed = self._vocabulary("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(self.shape.layers)]
        self.norm = self._own("model.norm.weight")
        if config.tie_word_embeddings:
            self.head = self.embed.t()
        else:
            self.head = self._vocabulary("lm_head.weight").t()

        # Every name must have a place, and every place a name.
        if unknown := sorted(self.places.keys() ^ shapes.keys()):
            raise ModelError(
                f"the fast decoder does not know the parameters {', '.join(unknown)}; "
                "set fast = false"
            )

    def _number_rows(self) -> None:
        """Set the row of the fused projection that holds each row of q_proj, k_proj and v_proj.

        Element e of head j (queries 0 .. g - 1, key g, value g + 1) of kv head k is row
        k (g + 2) d + j d + position(e), where values stay in order: position(e) = e.
        """
        group = self.shape.group
        size = self.shape.head_dim
        order = _interleaved(size)

        # First rows of the kv heads [kv, 1, 1], and of all heads [kv, g + 2, 1].
        kv_heads = torch.arange(self.shape.kv_heads)[:, None, None]
        kv_heads = kv_heads * (group + 2) * size
        heads = torch.arange(group + 2)[None, :, None] * size
        heads = kv_heads + heads

        # Rows of their elements, [kv, heads, d].
        queries = heads[:, :group] + order
        keys = heads[:, group : group + 1] + order
        values = heads[:, group + 1 :] + torch.arange(size)
        self._order = order
        self._rows = {
            "q_proj": queries.flatten(),
            "k_proj": keys.flatten(),
            "v_proj": values.flatten(),
        }

    def _layer(self, prefix: str) -> Layer:
        """Allocate one block, whose parameters' names begin with `prefix`."""
        attention = prefix + "self_attn."
        mlp = prefix + "mlp."
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
        """Allocate a tensor without values."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Allocate a matrix [rows, columns].

        In float32 on a CPU its memory is that of the transpose: products of small matrices are 10
        to 50% faster, and an update takes longer. In bfloat16 that would be slower for both.
        """
        if self._device.type == "cpu" and self._dtype == torch.float32:
            return self._empty(columns, rows).t()
        return self._empty(rows, columns)

    def _place(
        self,
        name: str,
        storage: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Note the storage of this rank's box of a parameter."""
        shape = self._names[name]
        box = self.split.box(name, shape)
        self.places[name] = StoredBox(storage, rows, shape, box)

    def _own(self, name: str, rows: torch.Tensor | None = None) -> Any:
        """Allocate a parameter with a storage of its own; None where the model has none."""
        if name not in self._names:
            return None
        box = self.split.box(name, self._names[name])
        if name.endswith("proj.weight"):
            storage = self._matrix(*box.shape)
        else:
            storage = self._empty(*box.shape)
        self._place(name, storage, rows)
        return storage

    def _vocabulary(self, name: str) -> Any:
        """Allocate a parameter that is cut by vocabulary, with equally many rows on every rank.

        Rows after the end of the vocabulary are never written, and their outputs are never read.
        """
        shape = self._names[name]
        rows = -(-shape[0] // self.split.tp)
        storage = self._empty(rows, *shape[1:])

        # The last ranks may hold fewer rows, or none.
        held = self.split.box(name, shape).shape[0]
        self._place(name, storage[:held])
        return storage

    def _qkv(self, attention: str, kind: str) -> Any:
        """Allocate the fused "weight" or "bias" of q_proj, k_proj and v_proj; None without them."""
        if f"{attention}q_proj.{kind}" not in self._names:
            return None
        rows = sum(len(index) for index in self._rows.values())
        if kind == "weight":
            storage = self._matrix(rows, self.shape.hidden)
        else:
            storage = self._empty(rows)
        for part, index in self._rows.items():
            self._place(f"{attention}{part}.{kind}", storage, index)
        return storage

    def _gate_up(self, mlp: str) -> torch.Tensor:
        """Allocate the fused matrix of gate_proj and up_proj."""
        size = self.shape.intermediate
        storage = self._matrix(2 * size, self.shape.hidden)
        self._place(mlp + "gate_proj.weight", storage[:size])
        self._place(mlp + "up_proj.weight", storage[size:])
        return storage
