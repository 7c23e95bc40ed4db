"""The model of a role: a Hugging Face folder, or a config with weights drawn from a seed."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class ModelConfig:
    """Settings of a model: `path` (a Hugging Face folder with config.json and safetensors) or
    `config` (random weights)."""

    path: str | None = None
    """Folder with config.json and model.safetensors; that of a finished run, for the model that it
    exported; or "stage:NAME" for what an earlier run stage exported."""
    config: dict[str, Any] | None = None
    """Fields of the Hugging Face config; `model_type` is required."""
    init_seed: int = 0
    """Seed of random weights, and of a new value head."""


@attrs.frozen
class ModelSpec:
    """A resolved model: its Hugging Face config fields, and where its weights come from."""

    # The architecture, and the weights
    hf_config: dict[str, Any]
    path: str | None
    """Folder with the weights; None for random ones."""
    init_seed: int
    """Seed of random weights, and of a new value head."""

    # Its use in a run
    kind: str = "policy"
    """"policy" (next-token logits), "value" (one value per token) or "score" (one score per
    sequence)."""
    export: str | None = None
    """Folder that an earlier run stage will have written before this model is built; `path` is not
    set until then."""

    @property
    def vocab_size(self) -> int:
        """The number of embeddings."""
        return int(self.hf_config["vocab_size"])

    @property
    def max_positions(self) -> int | None:
        """The largest number of positions; None: the config sets no limit."""
        return self.hf_config.get("max_position_embeddings")
