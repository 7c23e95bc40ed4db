"""Shapes of Llama-like models (Llama, Qwen2, Qwen3, Mistral; Mixtral and Qwen-MoE) from their Hugging Face config alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.errors import ConfigError
from hybridflow.core.weights import Param


@attrs.frozen
class ModelShape:
    """The sizes that decide a model's parameters. Names are those of the saved Hugging Face model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Experts of every layer; 0: a dense model."""
    expert_intermediate: int = 0
    expert_names: str = "mlp"
    """"mlp" (Qwen: mlp.experts.N.gate_proj) or "block_sparse_moe" (Mixtral: block_sparse_moe.experts.N.w1)."""
    shared_intermediate: int = 0
    """Of Qwen2-MoE's shared expert; 0: none."""
    experts_per_token: int = 0
    """Of a mixture: how many experts see a token."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From config.json's fields. Raises ConfigError for fields that lack, and model types that are not Llama-like."""
        kind = config.get("model_type")
        known = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")
        if kind not in known:
            raise ConfigError([f"model_type is {kind!r}; shapes are known of {', '.join(known)}"])
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        if lacking := [name for name in names if not isinstance(config.get(name), int)]:
            raise ConfigError([f"the model's config lacks {name}" for name in lacking])
        heads = config["num_attention_heads"]
        moe = kind in ("mixtral", "qwen2_moe", "qwen3_moe")
        bias = config.get("attention_bias", False)
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(bias or kind in ("qwen2", "qwen2_moe")),
            out_bias=bool(bias) and kind in ("llama", "qwen3", "qwen3_moe"),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=(config.get("num_local_experts") or config.get("num_experts") or 0) if moe else 0,
            expert_intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
            expert_names="block_sparse_moe" if kind == "mixtral" else "mlp",
            shared_intermediate=config.get("shared_expert_intermediate_size", 0) if kind == "qwen2_moe" else 0,
            experts_per_token=(config.get("num_experts_per_tok") or 2) if moe else 0,
        )

    @classmethod
    def read(cls, where: str | Path) -> ModelShape:
        """Of a built-in name (`llama-70b`), a config.json, or a folder with one."""
        if str(where) in BUILT_IN:
            return BUILT_IN[str(where)]
        path = Path(where) / "config.json" if Path(where).is_dir() else Path(where)
        try:
            return cls.of(json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(
                [f"{where!s} is neither a model's folder, nor a config.json, nor one of {', '.join(BUILT_IN)}"]
            ) from error
        except json.JSONDecodeError as error:
            raise ConfigError([f"{path} is not JSON: {error}"]) from error

    def params(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Param]:
        """Canonical name -> Param, in the model's order; a tied head is left out."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer().items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return {name: Param(shape, dtype) for name, shape in shapes.items()}

    @property
    def ties(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied else {}

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Of one layer, without its prefix."""
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        found: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"self_attn.{name}_proj.weight"] = (rows, h)
            if self.qkv_bias:
                found[f"self_attn.{name}_proj.bias"] = (rows,)
        found["self_attn.o_proj.weight"] = (h, q)
        if self.out_bias:
            found["self_attn.o_proj.bias"] = (h,)
        if self.qk_norm:
            found |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        found |= {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
        if not self.experts:
            return found | _mlp("mlp.", ("gate_proj", "down_proj", "up_proj"), h, self.intermediate)
        sparse = self.expert_names == "block_sparse_moe"
        parts = ("w1", "w2", "w3") if sparse else ("gate_proj", "down_proj", "up_proj")
        found[f"{self.expert_names}.gate.weight"] = (self.experts, h)
        for expert in range(self.experts):
            found |= _mlp(f"{self.expert_names}.experts.{expert}.", parts, h, self.expert_intermediate)
        if self.shared_intermediate:
            found |= _mlp("mlp.shared_expert.", ("gate_proj", "down_proj", "up_proj"), h, self.shared_intermediate) | {
                "mlp.shared_expert_gate.weight": (1, h)
            }
        return found


def _mlp(prefix: str, parts: tuple[str, str, str], hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    gate, down, up = parts
    return {f"{prefix}{gate}.weight": (size, hidden), f"{prefix}{up}.weight": (size, hidden),
            f"{prefix}{down}.weight": (hidden, size)}  # fmt: skip


BUILT_IN = {
    "llama-7b": ModelShape(4096, 32, 32, 32, 128, 11008, 32000),
    "llama-13b": ModelShape(5120, 40, 40, 40, 128, 13824, 32000),
    "llama-34b": ModelShape(8192, 48, 64, 8, 128, 22016, 32000),
    "llama-70b": ModelShape(8192, 80, 64, 8, 128, 28672, 32000),
    "llama-3-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "qwen2.5-0.5b": ModelShape(896, 24, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": ModelShape(1536, 28, 12, 2, 128, 8960, 151936, tied=True, qkv_bias=True),
    "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152064, qkv_bias=True),
}
"""Published shapes, for `hybridflow reshard --model` and for planning without a download."""
