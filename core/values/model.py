"""Which model a role runs: a Hugging Face folder, or a config with weights drawn from a seed."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class ModelConfig:
    """Give `path` (a Hugging Face folder with config.json and safetensors) or `config` (random weights)."""

    path: str | None = None
    """Folder with config.json and model.safetensors, or "stage:NAME": what an earlier stage of this run exported."""
    config: dict[str, Any] | None = None
    """Fields of the Hugging Face config; `model_type` is required."""
    init_seed: int = 0
    """Seed of random weights, and of a new value head."""


@attrs.frozen
class ModelSpec:
    """A resolved model: its Hugging Face config fields, and where its weights come from."""

    hf_config: dict[str, Any]
    path: str | None
    init_seed: int
    kind: str = "policy"
    """"policy" (next-token logits), "value" (one value per token) or "score" (one score per sequence)."""
    export: str | None = None
    """A folder that an earlier stage of the run will have written before this model is built; `path` is then not set yet."""

    @property
    def vocab_size(self) -> int:
        return int(self.hf_config["vocab_size"])

    @property
    def max_positions(self) -> int | None:
        return self.hf_config.get("max_position_embeddings")
