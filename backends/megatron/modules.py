"""GPTModel for a role: norms, attention by torch, hidden states instead of logits, a head of one output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")


class Norm(torch.nn.RMSNorm):
    """Megatron's own for the local spec does not know sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  its gradient is summed over tp then


class Attention(MegatronModule):
    """Causal attention by torch's kernels; the local spec's own knows no packed rows and makes all scores at once."""

    def __init__(
        self, config, layer_number, attn_mask_type=None, attention_type=None, attention_dropout=None, softmax_scale=None,
        cp_comm_type=None, pg_collection=None,
    ):  # fmt: skip
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):  # fmt: skip
        """[S, B, heads, D] -> [S, B, heads * D]; packed: [tokens, heads, D] -> [tokens, heads * D]."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, tokens, D]
        lengths = packed_seq_params.lengths
        rows = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([self._attend(*row) for row in rows], dim=2)[0].transpose(0, 1).flatten(1)

    def _attend(self, q, k, v):
        many = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=many
        )


class RoleGPT(GPTModel):
    """Its last stage gives hidden states, [S, B, H]: the head is applied where it is needed, and nowhere else."""

    def _postprocess(self, hidden_states, *unused, **more):
        return hidden_states


def transformer_config(
    hf: Any, config: MegatronConfig, layout: ParallelLayout, device: torch.device
) -> Any:
    """Raises ModelError for an architecture, an activation or a rotary scaling that this backend does not have."""
    if hf.model_type not in ARCHITECTURES:
        raise ModelError(
            f"backend megatron builds {', '.join(ARCHITECTURES)}; got {hf.model_type!r}: choose backend fsdp or deepspeed"
        )
    if hf.hidden_act != "silu":
        raise ModelError(
            f"backend megatron knows the activation silu, got {hf.hidden_act!r}; choose another backend"
        )
    tp, heads, groups = layout.tp, hf.num_attention_heads, hf.num_key_value_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": hf.intermediate_size,
    }
    if bad := [f"{name} {size}" for name, size in sizes.items() if size % tp]:
        raise ModelError(
            f"tp {tp} must divide the model's {', '.join(bad)}; choose a smaller layout.tp"
        )
    if hf.num_hidden_layers % (layout.pp * config.virtual_stages):
        raise ModelError(
            f"{hf.num_hidden_layers} layers do not divide into pp {layout.pp} x virtual_stages {config.virtual_stages}; "
            "choose others"
        )
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    gpu = device.type == "cuda"
    recompute = dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    return TransformerConfig(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=heads, num_query_groups=groups, kv_channels=getattr(hf, "head_dim", None),
        add_bias_linear=False, add_qkv_bias=hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
        qk_layernorm=hf.model_type == "qwen3", normalization="RMSNorm", layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True, activation_func=F.silu, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
        sequence_parallel=config.sequence_parallel and tp > 1, params_dtype=dtype, pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16, use_cpu_initialization=not gpu, perform_initialization=False,
        variable_seq_lengths=config.virtual_stages == 1, moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True, batch_p2p_comm=gpu,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, **(recompute if config.recompute else {}),
    )  # fmt: skip


def rotary(hf: Any) -> dict[str, Any]:
    """GPTModel's arguments. Raises ModelError for a scaling that Megatron does not compute."""
    found = getattr(hf, "rope_parameters", None) or {}
    kind = found.get("rope_type", "default")
    base = {
        "position_embedding_type": "rope",
        "rotary_base": found.get("rope_theta") or getattr(hf, "rope_theta", 1e4),
    }
    if kind == "default":
        return base
    standard = (
        found.get("low_freq_factor"),
        found.get("high_freq_factor"),
        found.get("original_max_position_embeddings"),
    )
    if kind == "llama3" and standard == (1.0, 4.0, 8192):
        return base | {"rope_scaling": True, "rope_scaling_factor": found["factor"]}
    raise ModelError(
        f"backend megatron does not compute rotary embeddings of type {found}; choose backend fsdp or deepspeed"
    )


def layer_spec(config: Any, layers: int) -> TransformerBlockSubmodules:
    """Of one chunk."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = Attention
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)


def build_chunks(
    hf: Any, config: Any, kind: str, layout: ParallelLayout, groups: Any, vocab: int
) -> list[RoleGPT]:  # fmt: skip
    """This rank's chunks of layers, without values. vocab: padded, a multiple of tp."""
    virtual = config.virtual_pipeline_model_parallel_size or 1
    stage, stages = groups.pp.rank(), groups.pp.size()
    tied = bool(getattr(hf, "tie_word_embeddings", False)) and kind == "policy"
    chunks = []
    for at in range(virtual):
        first, last = stage == 0 and at == 0, stage == stages - 1 and at == virtual - 1
        chunk = RoleGPT(
            config=config, transformer_layer_spec=layer_spec(config, hf.num_hidden_layers // (stages * virtual)),
            vocab_size=vocab, max_sequence_length=hf.max_position_embeddings, pre_process=first, post_process=last,
            share_embeddings_and_output_weights=tied, pg_collection=groups, vp_stage=at if virtual > 1 else None,
            **rotary(hf),
        )  # fmt: skip
        if last and kind != "policy":
            del chunk.output_layer
            chunk.score = torch.nn.Linear(hf.hidden_size, 1, bias=False)
        _mark_split(chunk)
        chunks.append(chunk)
    return chunks


def _mark_split(chunk: RoleGPT) -> None:
    """Say of weights that tp ranks have parts of them, which Megatron does where it draws the first values: the global
    norm counts the others once."""
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if (
            isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding))
            and weight is not None
        ):
            weight.tensor_model_parallel = True
            weight.partition_dim, weight.partition_stride = (
                int(isinstance(module, RowParallelLinear)),
                1,
            )
