"""Shapes of Llama-like models from the fields of their Hugging Face config alone.

Known are Llama, Qwen2, Qwen3 and Mistral, and the mixtures Mixtral and Qwen-MoE.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ConfigError
from hybridflow.core.values.model_shape import ModelShape, Shape
from hybridflow.core.values.text import parse_json

KNOWN = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")
"""Model types whose shapes are known."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Model types with a mixture of experts in every layer."""
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
"""Fields that a config must have."""

# Names of the parameters outside the layers.
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@attrs.frozen
class LayerSizes:
    """The sizes and options that decide the parameters of one layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    expert_intermediate: int = 0
    expert_names: str = "mlp"
    """"mlp" (Qwen: mlp.experts.N.gate_proj) or "block_sparse_moe" (Mixtral, with w1, w2, w3)."""
    shared_intermediate: int = 0
    """Intermediate size of an expert that every token sees; 0: none."""

    def parameters(self) -> dict[str, Shape]:
        """Return name -> shape of the layer's parameters, without the layer's prefix."""
        feed_forward = self._experts() if self.experts else self._dense()
        return self._attention() | self._norms() | feed_forward

    def _attention(self) -> dict[str, Shape]:
        # With grouped-query attention there are fewer keys and values than queries.
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        shapes: dict[str, Shape] = {}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"self_attn.{name}_proj.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                shapes[f"self_attn.{name}_proj.bias"] = (rows,)

        shapes["self_attn.o_proj.weight"] = (self.hidden, queries)
        if self.out_bias:
            shapes["self_attn.o_proj.bias"] = (self.hidden,)
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return shapes

    def _norms(self) -> dict[str, Shape]:
        return {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    def _dense(self) -> dict[str, Shape]:
        return self._matrices("mlp.", ("gate_proj", "down_proj", "up_proj"), self.intermediate)

    def _experts(self) -> dict[str, Shape]:
        sparse = self.expert_names == "block_sparse_moe"
        parts = ("w1", "w2", "w3") if sparse else ("gate_proj", "down_proj", "up_proj")

        # The router, then the experts, then the one that every token sees.
        router = f"{self.expert_names}.gate.weight"
        shapes: dict[str, Shape] = {router: (self.experts, self.hidden)}
        for expert in range(self.experts):
            prefix = f"{self.expert_names}.experts.{expert}."
            shapes |= self._matrices(prefix, parts, self.expert_intermediate)
        if self.shared_intermediate:
            shared = ("gate_proj", "down_proj", "up_proj")
            shapes |= self._matrices("mlp.shared_expert.", shared, self.shared_intermediate)
            shapes["mlp.shared_expert_gate.weight"] = (1, self.hidden)
        return shapes

    def _matrices(
        self,
        prefix: str,
        parts: tuple[str, str, str],
        size: int,
    ) -> dict[str, Shape]:
        """Return name -> shape of the three matrices of a gated feed-forward block."""
        # y = down (silu(gate x) * (up x))
        gate, down, up = parts
        return {
            f"{prefix}{gate}.weight": (size, self.hidden),
            f"{prefix}{up}.weight": (size, self.hidden),
            f"{prefix}{down}.weight": (self.hidden, size),
        }


def llama_shape(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    tied: bool = False,
    *,
    experts_per_token: int = 0,
    **more: Any,
) -> ModelShape:
    """Return the shape of a model of equal layers, under the names of Hugging Face's Llama.

    `more` has further fields of Layer (qkv_bias, experts, ...).
    """
    layer = LayerSizes(hidden, heads, kv_heads, head_dim, intermediate, **more)

    # A tied head has no parameter of its own.
    head: dict[str, Shape] = {}
    if not tied:
        head[HEAD] = (vocab, hidden)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        layer=layer.parameters(),
        before={EMBEDDING: (vocab, hidden)},
        after={NORM: (hidden,)} | head,
        ties={HEAD: EMBEDDING} if tied else {},
        layer_prefix="model.layers.{}.",
        experts=layer.experts,
        expert_intermediate=layer.expert_intermediate,
        shared_intermediate=layer.shared_intermediate,
        experts_per_token=experts_per_token,
    )


SMALL = 500_000_000
"""Parameters that a small model has at most."""


def is_small(config: Mapping[str, Any]) -> bool:
    """Return whether a model is known to have at most SMALL parameters, by its config.json."""
    try:
        shape = shape_of(config)
    except ConfigError:
        return False
    return sum(prod(sizes) for sizes in shape.parameters().values()) <= SMALL


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model by the fields of its config.json.

    Raises ConfigError for missing fields, and for model types that are not Llama-like.
    """
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise ConfigError([f"model_type is {kind!r}; shapes are known of {', '.join(KNOWN)}"])
    if missing := [name for name in SIZES if not isinstance(config.get(name), int)]:
        raise ConfigError([f"the model's config lacks {name}" for name in missing])

    # Only mixtures have experts, even if another type's config has such fields.
    experts = 0
    experts_per_token = 0
    if kind in MIXTURES:
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        experts_per_token = config.get("num_experts_per_tok") or 2
    shared = config.get("shared_expert_intermediate_size", 0) if kind == "qwen2_moe" else 0

    # Absent fields: every head has its own keys and values, and heads divide the hidden size. Qwen2
    # has biases of queries, keys and values, whatever its config says.
    heads = config["num_attention_heads"]
    bias = config.get("attention_bias", False)
    return llama_shape(
        config["hidden_size"],
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
        config["intermediate_size"],
        config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(bias or kind in ("qwen2", "qwen2_moe")),
        out_bias=bool(bias) and kind in ("llama", "qwen3", "qwen3_moe"),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=experts,
        expert_intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
        expert_names="block_sparse_moe" if kind == "mixtral" else "mlp",
        shared_intermediate=shared,
        experts_per_token=experts_per_token,
    )


def read_shape(where: str | Path) -> ModelShape:
    """Return the shape by a published name (`llama-70b`), a config.json, or a folder with one.

    Raises ConfigError where none of them exists, or the shape is not known.
    """
    if str(where) in PUBLISHED:
        return PUBLISHED[str(where)]
    return shape_of(read_fields(where))


def read_fields(where: str | Path) -> dict[str, Any]:
    """Return the fields of a config.json, given by its path or its folder's.

    Raises ConfigError where it cannot be read.
    """
    path = Path(where) / "config.json" if Path(where).is_dir() else Path(where)
    try:
        fields = parse_json(path.read_bytes())
    except OSError as error:
        problem = (
            f"{where!s} is neither a model's folder, nor a config.json, nor one of "
            f"{', '.join(PUBLISHED)}"
        )
        raise ConfigError([problem]) from error
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON: {error}"]) from error
    if not isinstance(fields, dict):
        raise ConfigError([f"{path} holds no fields, but {fields!r:.80}"])
    return fields


PUBLISHED = {
    "llama-7b": llama_shape(4096, 32, 32, 32, 128, 11008, 32000),
    "llama-13b": llama_shape(5120, 40, 40, 40, 128, 13824, 32000),
    "llama-34b": llama_shape(8192, 48, 64, 8, 128, 22016, 32000),
    "llama-70b": llama_shape(8192, 80, 64, 8, 128, 28672, 32000),
    "llama-3-8b": llama_shape(4096, 32, 32, 8, 128, 14336, 128256),
    "qwen2.5-0.5b": llama_shape(896, 24, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": llama_shape(1536, 28, 12, 2, 128, 8960, 151936, tied=True, qkv_bias=True),
    "qwen2.5-7b": llama_shape(3584, 28, 28, 4, 128, 18944, 152064, qkv_bias=True),
}
"""Published shapes, for `hybridflow reshard --model` and for planning without a download."""
