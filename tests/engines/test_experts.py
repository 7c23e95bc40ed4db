"""A mixture of experts, trained sharded and generated with by another package: the engine has the trainer's weights."""

from __future__ import annotations

import pytest
from helpers.paths import matrix
from helpers.tiny import learning, ran_here, write
from helpers.zoo_cells import check_cells

EXPERTS = (
    'actor.model.config={ model_type = "qwen3_moe", vocab_size = 16, hidden_size = 128, num_hidden_layers = 2, '
    "num_attention_heads = 4, num_key_value_heads = 2, head_dim = 32, intermediate_size = 64, num_experts = 4, "
    "num_experts_per_tok = 2, moe_intermediate_size = 16, max_position_embeddings = 64, tie_word_embeddings = false }"
)
ENGINES = {
    "vllm": ['rollout={ name = "vllm", kv_memory_gb = 0.05 }'],
    "sglang": ['rollout={ name = "sglang", kv_tokens = 4096, max_sequences = 16 }'],
}


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        pytest.param("deepspeed", "vllm", marks=matrix),
        pytest.param("fsdp", "sglang", marks=matrix),
        pytest.param("fsdp", "vllm", marks=matrix),
        pytest.param("deepspeed", "sglang", marks=matrix),
    ],
)
def test_the_engine_speaks_with_the_weights_that_were_trained(tmp_path, backend, engine):
    pytest.importorskip(engine)
    pytest.importorskip(backend if backend == "deepspeed" else "torch")
    write(tmp_path)
    ranks = ["runtime=ray", "pools.main=[2]", "actor.generation.tp=2"]
    settings = [*ranks, f"actor.backend.name={backend}", EXPERTS, "run.steps=3"]
    ran_here(tmp_path, *settings, *ENGINES[engine])
    rows = learning(tmp_path / "runs/tiny")
    assert len(rows) == 3
    assert [row["actor/mismatch_mean"] for row in rows] == pytest.approx([0.0] * 3, abs=1e-4)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@matrix
def test_an_engine_has_the_weights_of_other_experts(engine):
    """Fused on disk; one by one as w1, w2, w3; with MLA, which SGLang's attention on a CPU lacks."""
    with_mla = ("deepseek_v2",) if engine == "vllm" else ()
    check_cells(("granitemoe", "mixtral", *with_mla), engine)
