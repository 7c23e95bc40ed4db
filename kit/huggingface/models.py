"""Hugging Face's side of a ModelSpec: its config object, its folder, and the parameters that it saves."""

from __future__ import annotations

from typing import Any

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec


def hf_config_of(model: ModelSpec) -> Any:
    """The Hugging Face config of a ModelSpec."""
    from transformers import AutoConfig

    if model.path is not None:
        return AutoConfig.from_pretrained(model.path)
    return AutoConfig.for_model(**model.hf_config)


def policy_config(model: ModelSpec) -> Any:
    """The Hugging Face config of what a rollout engine generates with. Raises ModelError for a model that is no policy."""
    if model.kind != "policy":
        raise ModelError(
            f"a rollout engine generates with a policy; this model is a {model.kind!r} model"
        )
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
