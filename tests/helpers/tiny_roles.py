"""A role of one small layer, and the plainest loss for it."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.job.job import ModelRole
from hybridflow.core.values.model import ModelSpec

MODEL = {
    "model_type": "qwen2", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
ENGINE: dict[str, Any] = {"engine": "transformers", "engine_config": TransformersEngineConfig()}
"""What a role has that generates."""


def role(lr: float, **changes: Any) -> ModelRole:
    """Trained by the FSDP backend, in micro-batches of 40 tokens."""
    return ModelRole(
        ModelSpec(MODEL, None, 0), "fsdp", FSDPConfig(), 40, OptimizerConfig(lr=lr), **changes
    )


class NextToken(Loss):
    def __call__(self, batch, outputs):
        return Term("nll", -outputs["logprobs"])
