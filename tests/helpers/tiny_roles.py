"""A role of one small layer, the plainest loss for it, and how its weights are synced."""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.backends.transports.disk import DiskConfig
from hybridflow.core.contracts.loss import Loss, Term
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.job.job import ModelRole, SyncSpec
from hybridflow.core.job.sections import SyncConfig
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


def sync(transport: str = "auto", folder: str | None = None, **settings: Any) -> SyncSpec:
    """With a transport by name; `folder` is for the one that needs it. Buckets may be tiny."""
    with attrs.validators.disabled():
        config = SyncConfig(**settings)
    return SyncSpec(transport, transport_config(transport, folder), config)


def transport_config(transport: str, folder: str | None) -> DiskConfig | None:
    return DiskConfig(folder) if transport == "disk" and folder is not None else None
