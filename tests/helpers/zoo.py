"""The zoo: small models of many architectures, and what is known of each with each engine.

zoo_cells.py runs them; `make zoo` runs all and writes docs/zoo.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm": {"kv_memory_gb": 0.02, "max_sequences": 4, "max_length": 64},
    "sglang": {
        "kv_tokens": 1024,
        "max_sequences": 4,
        "max_length": 64,
        # An engine that hangs is said before the cell's own limit ends it.
        "start_timeout_s": 240.0,
        "hang_timeout_s": 120.0,
    },
}
"""Engine -> its settings."""
BAR = 1e-4
"""The largest difference of a logprob from Hugging Face's, in nats, in float32."""
TWO_RANKS = ("llama", "qwen2", "phi3", "qwen3_moe", "mixtral", "deepseek_v2")
"""Architectures that run with tp 2, too."""

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 176, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""Heads of 32, the least that vLLM takes on a CPU, and a vocabulary that nothing divides."""
WHOLE_HEADS = ("num_key_value_heads",)
OF_GPT2 = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
           "max_position_embeddings")  # fmt: skip
TIED = {"tie_word_embeddings": True}
HEADS = {"head_dim": 32}
WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SCALES = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
LATENT = {
    **ROUTED, "kv_lora_rank": 512, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "head_dim": 64, "num_key_value_heads": 4, "moe_layer_freq": 1,
}  # fmt: skip
LITE = {"q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax"}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


@attrs.frozen
class Animal:
    """An architecture of the zoo."""

    model_type: str
    what: str
    """What is special about it."""
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of its config beside SIZES."""
    without: tuple[str, ...] = ()
    """Fields of SIZES that its config lacks."""

    def config(self) -> dict[str, Any]:
        fields = {name: value for name, value in SIZES.items() if name not in self.without}
        return {"model_type": self.model_type, **fields, **self.fields}


ZOO: dict[str, Animal] = {
    # Dense
    "llama": Animal("llama", "untied"),
    "llama-1kv": Animal("llama", "1 key-value head", {"num_key_value_heads": 1}),
    "llama-3kv": Animal("llama", "6 heads, 3 key-value heads",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192}),
    "qwen2": Animal("qwen2", "tied, biases", TIED),
    "qwen3": Animal("qwen3", "norms of heads", HEADS),
    "mistral": Animal("mistral", "sliding window", {**HEADS, **WINDOW}),
    "phi3": Animal("phi3", "fused on disk"),
    "phi": Animal("phi", "biases, of the head too", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "gemma": Animal("gemma", "tied, norms with +1", {**HEADS, **TIED}),
    "gemma2": Animal("gemma2", "norms with +1, sliding windows, caps", {**HEADS, **TIED, **WINDOW,
        "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma3": Animal("gemma3_text", "norms with +1, sliding windows", {**HEADS, **TIED, **MIXED, "query_pre_attn_scalar": 32}),
    "granite": Animal("granite", "multipliers", SCALES),
    "olmo2": Animal("olmo2", "norms behind blocks"),
    "glm4": Animal("glm4", "gate and up fused on disk", {**HEADS, "partial_rotary_factor": 0.5}),
    "smollm3": Animal("smollm3", "tied, layers without positions", {**TIED, "no_rope_layers": [1, 0]}),
    "exaone4": Animal("exaone4", "sliding windows, norms behind blocks", MIXED),
    "stablelm": Animal("stablelm", "layer norms, a quarter of a head rotates", {"partial_rotary_factor": 0.25}),
    "starcoder2": Animal("starcoder2", "tied, biases", TIED),
    "cohere": Animal("cohere", "tied, parallel blocks, scaled logits", {**TIED, "logit_scale": 0.25}),
    "seed_oss": Animal("seed_oss", "biases of attention", HEADS),
    "ernie4_5": Animal("ernie4_5", "tied, interleaved positions", TIED),
    # Older ones
    "gpt2": Animal("gpt2", "tied, transposed matrices", {**TIED, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128},
        OF_GPT2),
    "gpt_neox": Animal("gpt_neox", "queries, keys, values fused by heads", {}, WHOLE_HEADS),
    "opt": Animal("opt", "tied, learned positions", {**TIED, "ffn_dim": 176, "word_embed_proj_dim": 128, "pad_token_id": 1},
        (*WHOLE_HEADS, "intermediate_size")),
    "falcon": Animal("falcon", "tied, queries, keys, values fused by groups",
        {**TIED, "new_decoder_architecture": True, "num_kv_heads": 2}, (*WHOLE_HEADS, "intermediate_size")),
    "bloom": Animal("bloom", "tied, ALiBi, fused by heads", {**TIED, "n_layer": 2, "n_head": 4, "hidden_size": 128}, OF_GPT2),
    # Experts
    "qwen3_moe": Animal("qwen3_moe", "experts, saved one by one", {**EXPERTS, **HEADS}),
    "qwen2_moe": Animal("qwen2_moe", "experts and a shared one", {**EXPERTS, "shared_expert_intermediate_size": 96}),
    "olmoe": Animal("olmoe", "experts, norms of queries",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "mixtral": Animal("mixtral", "experts, saved as w1, w2, w3", LOCAL),
    "granitemoe": Animal("granitemoe", "experts fused on disk, multipliers", {**LOCAL, **SCALES}),
    "gpt_oss": Animal("gpt_oss", "experts fused on disk, sinks, sliding windows", {**LOCAL, **HEADS, **MIXED}),
    "glm4_moe": Animal("glm4_moe", "experts chosen with a bias", {**ROUTED, **HEADS, "partial_rotary_factor": 0.5}),
    "deepseek_v2": Animal("deepseek_v2", "MLA, experts and a shared one", {**LATENT, **YARN, **LITE}),
    "deepseek_v2-plain": Animal("deepseek_v2", "MLA without rope scaling", {**LATENT, **LITE}),
    "deepseek_v3": Animal("deepseek_v3", "MLA, experts chosen with a bias",
        {**LATENT, **YARN, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
}  # fmt: skip
"""Name -> architecture."""


@attrs.frozen
class Limit:
    """What is known not to work."""

    kind: str
    """ "refused" at the start, or "differs": the engine itself computes something else."""
    message: str
    """A part of what is said, or of how the values differ."""
    why: str = ""
    """What is behind it, where the message does not say so."""


NO_CLASS = "has no SGlang implementation and the Transformers implementation is not compatible"
JOINED = "its loader joins two parameters, which we hand over one by one"
NO_LATENT = "Expected size for first two dimensions of batch2 tensor"
GELU = "it computes gelu exactly, and the architecture has the tanh form"
LIMITS: dict[tuple[str, str], Limit] = {
    ("bloom", "vllm"): Limit("differs", "logprobs differ by 4", GELU),
    ("gpt_oss", "vllm"): Limit("refused", "No Unquantized MoE backend supports the deployment"),
    ("phi", "vllm"): Limit("refused", "takes no lm_head.bias of this phi"),
    ("deepseek_v2-plain", "vllm"): Limit("refused", "other positions for a deepseek_v2 without"),
    ("mistral", "sglang"): Limit("refused", "has sliding windows in 0 of its 2 layers"),
    ("phi", "sglang"): Limit("refused", "leaves out the bias of its head"),
    ("gemma", "sglang"): Limit("differs", "logprobs differ by 8", GELU),
    ("gemma2", "sglang"): Limit("refused", "on a CPU leaves out the cap of attention scores"),
    ("exaone4", "sglang"): Limit(
        "refused", "is required for Exaone4ForCausalLM, but got torch_native"
    ),
    ("gpt_oss", "sglang"): Limit("refused", "attention backend, but got the following backends"),
    ("falcon", "sglang"): Limit("refused", NO_CLASS),
    ("bloom", "sglang"): Limit("refused", NO_CLASS),
    ("qwen2_moe", "sglang"): Limit(
        "refused", "0 active drivers", "it needs Triton, which has no CPU"
    ),
    ("deepseek_v2", "sglang"): Limit("refused", NO_LATENT, "its attention on a CPU has no MLA"),
    ("deepseek_v2-plain", "sglang"): Limit("refused", "AssertionError", "it asserts rope scaling"),
    ("deepseek_v3", "sglang"): Limit(
        "refused", "fused_qkv_a_proj_with_mqa.weight its values", JOINED
    ),
}
"""(architecture, engine) -> its limit, on a CPU in float32 with the versions of ci/engines. Others work."""
SPLIT = Limit("refused", "only the fast decoder has tensor parallelism")
TWO_RANKS_LIMITS = {
    (name, "transformers"): SPLIT for name in ("phi3", "qwen3_moe", "mixtral", "deepseek_v2")
}
"""The same of two ranks, beside LIMITS."""


def limit_of(name: str, engine: str, tp: int) -> Limit | None:
    """What is known not to work of a cell; None where it works."""
    known = LIMITS if tp == 1 else {**LIMITS, **TWO_RANKS_LIMITS}
    return known.get((name, engine))
