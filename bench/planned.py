"""CPU seconds to ask vLLM's loader what each tp rank takes of a model's config.json, and to plan a sync with it.

In a process of one thread, imports apart: the saved parameters by transformers, vLLM's model of each of eight tp ranks on
meta, its loader traced, and the plan from FSDP on 64 ranks to vLLM. Needs vLLM.
One JSON line per figure; exits 1 when a bar is missed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
from common import emit

RANKS, TP = 64, 8
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
    "num_experts_per_tok": 8, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"Llama-70B": (LLAMA, 30.0), "Qwen3-235B-A22B": (QWEN, 120.0)}
"""Model -> (its config.json, the most CPU seconds)."""


def main() -> int:
    from hybridflow.backends.vllm import planned

    # Imports apart: a small model loads what the large ones need.
    os.environ.update(planned.VARIABLES)
    import torch

    from hybridflow.core.resharding.plan import plan_reshard
    from hybridflow.core.values.parallel import ParallelLayout, generation_layout
    from hybridflow.kit.layouts import fsdp_layout

    for config, _ in MODELS.values():
        small = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 128,
                 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
        experts = {"num_experts": 4, "moe_intermediate_size": 64} if "num_experts" in config else {}
        planned.traced_ranks(config | small | experts, 2, "bfloat16", {})

    good = True
    layout = ParallelLayout(dp=RANKS)
    generation = generation_layout(layout, tp=TP, grouping="consecutive")
    for name, (config, bar) in MODELS.items():
        began = time.process_time()
        ranks = planned.traced_ranks(config, TP, "bfloat16", {})
        traced = time.process_time() - began
        params = ranks.params(torch.bfloat16)
        plan = plan_reshard(fsdp_layout(params, layout), ranks.layout(generation, torch.bfloat16))
        most = max(plan.bytes_received.values())
        whole = time.process_time() - began
        emit(f"{name}: {len(params):,} parameters asked of vLLM, tp {TP}", traced, "CPU s")
        emit(f"{name}: the most that a rank receives", most / 1e9, "GB")
        good &= emit(
            f"{name}: asked and planned, {RANKS} ranks", whole, "CPU s", bar=bar, at_most=True
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
