"""Which model a role runs: a Hugging Face folder, or a config with weights drawn from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.errors import ModelError


@attrs.frozen
class ModelConfig:
    """Give `path` (a Hugging Face folder with config.json and safetensors) or `config` (random weights)."""

    path: str | None = None
    """Folder with config.json and model.safetensors, or "stage:NAME": what an earlier stage of this run exported."""
    config: dict[str, Any] | None = None
    """Fields of the Hugging Face config; `model_type` is required (qwen2, llama, ...)."""
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

    @property
    def vocab_size(self) -> int:
        return int(self.hf_config["vocab_size"])

    @property
    def max_positions(self) -> int | None:
        return self.hf_config.get("max_position_embeddings")


def resolve_model(config: ModelConfig, kind: str, role: str, weights: bool = True) -> ModelSpec:
    """Read the model's config.json, or take the inline one. Raises ModelError with what is missing; without `weights` it
    is enough that a folder has a config.json."""
    if (config.path is None) == (config.config is None):
        raise ModelError(
            f"{role}.model needs exactly one of `path` (a Hugging Face folder) and `config` (random weights); "
            f"got {'both' if config.path else 'neither'}"
        )
    if config.config is not None:
        if "model_type" not in config.config:
            raise ModelError(f'{role}.model.config needs model_type, for example model_type = "qwen2"')
        return ModelSpec(dict(config.config), None, config.init_seed, kind)
    folder = Path(config.path or "")
    if not folder.is_dir():
        raise ModelError(f"{role}.model.path: there is no folder {str(folder)!r}")
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{role}.model.path: {str(folder)!r} has no config.json (it has {found})")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{role}.model.path: {str(folder)!r} has no *.safetensors weights")
    try:
        fields = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{role}.model.path: {folder / 'config.json'} is not JSON: {error}") from error
    return ModelSpec(fields, str(folder), config.init_seed, kind)


def hf_config_of(model: ModelSpec) -> Any:
    """The Hugging Face config of a ModelSpec."""
    from transformers import AutoConfig

    if model.path is not None:
        return AutoConfig.from_pretrained(model.path)
    return AutoConfig.for_model(**model.hf_config)


def policy_config(model: ModelSpec) -> Any:
    """The Hugging Face config of what a rollout engine generates with. Raises ModelError for a model that is no policy."""
    if model.kind != "policy":
        raise ModelError(f"a rollout engine generates with a policy; this model is a {model.kind!r} model")
    return hf_config_of(model)


def write_config(hf_config: Any, folder: str) -> None:
    """config.json, which names the class of the model, for engines that read a folder."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM._model_mapping[type(hf_config)]
    hf_config.architectures = hf_config.architectures or [model_class.__name__]
    hf_config.save_pretrained(folder)


def saved_parameters(hf_config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Names and shapes of the parameters that `save_pretrained` writes, and the ties: tied name -> saved name."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    ties = {name: source for name, source in model.all_tied_weights_keys.items() if name != source}
    return {n: tuple(v.shape) for n, v in model.state_dict().items() if n not in ties}, ties
