"""GPTModel for a role: norms, attention by torch, hidden states instead of logits, scalar heads.

Layers of a model of 8 with pp 2 and virtual_stages 2 (arXiv:2104.04473, section 2.2):

                       chunk 0    chunk 1
    pipeline stage 0    0  1       4  5
    pipeline stage 1    2  3       6  7
"""

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
from hybridflow.backends.megatron.fit import is_llama3, why_not
from hybridflow.core.errors import ModelError
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.attention import attend_packed


class Norm(torch.nn.RMSNorm):
    """RMSNorm that works under sequence parallelism, which that of Megatron's local spec does not.

    The mark on its weight makes Megatron sum the gradient over the tp ranks.
    """

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class Attention(MegatronModule):
    """Causal attention within each of the packed rows, by torch's kernels.

    The local spec's own attention does not support packed rows, and holds all S x S scores at once.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type=None,
        attention_type=None,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        """Return [tokens, 1, heads * D] of [tokens, 1, heads, D]; key and value may have fewer
        heads.
        """
        rows = packed_seq_params.rows
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        return attend_packed(query, key, value, rows, self.scale).flatten(1)[:, None]


class RoleGPT(GPTModel):
    """A GPTModel whose last pipeline stage returns hidden states [S, B, H].

    The head is applied by outputs.py, only to the tokens that need it.
    """

    def _preprocess(self, *args, packed_seq_params, **more):
        """Compute each token's rotary embedding by its position in its row.

        Megatron's own code for packed rows reads their lengths from the device in each layer.
        """
        decoder_input, rotations, *rest = super()._preprocess(
            *args, packed_seq_params=packed_seq_params, **more
        )
        return (decoder_input, rotations.index_select(0, packed_seq_params.positions), *rest)

    def _postprocess(self, hidden_states, *unused, **more):
        return hidden_states


def transformer_config(
    hf: Any, config: MegatronConfig, layout: ParallelLayout, device: torch.device
) -> Any:
    """Return Megatron's TransformerConfig for a Hugging Face config.

    Raises ModelError for an architecture, an activation or sizes that this backend or the layout
    does not allow.
    """
    if problems := why_not(hf, config, layout):
        raise ModelError("; ".join(problems))
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    on_gpu = device.type == "cuda"
    virtual = config.virtual_stages

    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    has_bias = hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False))
    return TransformerConfig(
        # Sizes
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None),
        # Architecture
        add_bias_linear=False,
        add_qkv_bias=has_bias,
        qk_layernorm=hf.model_type == "qwen3",
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Parallelism; only the interleaved schedule needs shapes that are fixed beforehand
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        sequence_parallel=config.sequence_parallel and layout.tp > 1,
        variable_seq_lengths=virtual == 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=on_gpu,
        # Precision and first values (the backend fills them in)
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        # Losses are sums, which Megatron must not divide by the number of micro-batches
        calculate_per_token_loss=True,
        # No fused kernels: some need Apex or Transformer Engine
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(recompute if config.recompute else {}),
    )


def rotary(hf: Any) -> dict[str, Any]:
    """Return GPTModel's arguments for the rotary embeddings of a Hugging Face config.

    A scaling is Llama 3's (`why_not`).
    """
    parameters = getattr(hf, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    base = {
        "position_embedding_type": "rope",
        "rotary_base": parameters.get("rope_theta") or getattr(hf, "rope_theta", 1e4),
    }
    if kind == "default":
        return base

    assert is_llama3(parameters), parameters
    return base | {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}


def layer_spec(config: Any, layers: int) -> TransformerBlockSubmodules:
    """Return the modules of a chunk of `layers` layers, with this file's norm and attention."""
    # The same spec object serves all layers: Megatron builds each layer's modules from it.
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = Attention
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)


def build_chunks(
    hf: Any,
    config: Any,
    kind: str,
    layout: ParallelLayout,
    groups: Any,
    vocab: int,
) -> list[RoleGPT]:
    """Return this rank's chunks of layers, their values not yet set.

    config: from `transformer_config`; kind: of the model; vocab: padded, a multiple of tp.
    """
    virtual = config.virtual_pipeline_model_parallel_size or 1
    stage = groups.pp.rank()
    stages = groups.pp.size()
    layers = hf.num_hidden_layers // (stages * virtual)
    tied = bool(getattr(hf, "tie_word_embeddings", False)) and kind == "policy"

    chunks = []
    for index in range(virtual):
        is_first = stage == 0 and index == 0
        is_last = stage == stages - 1 and index == virtual - 1
        chunk = RoleGPT(
            config=config,
            transformer_layer_spec=layer_spec(config, layers),
            vocab_size=vocab,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=tied,
            pg_collection=groups,
            vp_stage=index if virtual > 1 else None,
            **rotary(hf),
        )

        # Values and scores come from a head of one output, whole on every tp rank.
        if is_last and kind != "policy":
            del chunk.output_layer
            chunk.score = torch.nn.Linear(hf.hidden_size, 1, bias=False)
        _mark_split(chunk)
        chunks.append(chunk)
    return chunks


def _mark_split(chunk: RoleGPT) -> None:
    """Mark the weights that are cut over tp: the global norm counts all others once.

    Megatron marks them where it initialises the weights, which is switched off here.
    """
    split = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, split) and weight is not None:
            weight.tensor_model_parallel = True
            weight.partition_dim = int(isinstance(module, RowParallelLinear))
            weight.partition_stride = 1
