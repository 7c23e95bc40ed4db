"""Hugging Face's side of a ModelSpec: its config object, its folder, and the saved parameters."""

from __future__ import annotations

from typing import Any

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec


def hf_config_of(model: ModelSpec) -> Any:
    """Return the Hugging Face config of a ModelSpec."""
    from transformers import AutoConfig

    if model.path is not None:
        return AutoConfig.from_pretrained(model.path)
    return AutoConfig.for_model(**model.hf_config)


def policy_config(model: ModelSpec) -> Any:
    """Return the Hugging Face config of a model that a rollout engine generates with.

    Raises ModelError for a model that is no policy.
    """
    if model.kind != "policy":
        raise ModelError(
            f"a rollout engine generates with a policy; this model is a {model.kind!r} model"
        )
    return hf_config_of(model)


def write_config(hf_config: Any, folder: str) -> None:
    """Write config.json with the name of the model's class, for engines that read a folder."""
    from transformers import AutoModelForCausalLM

    # Engines choose their own class of model by this name.
    model_class: Any = AutoModelForCausalLM._model_mapping[type(hf_config)]
    hf_config.architectures = hf_config.architectures or [model_class.__name__]
    hf_config.save_pretrained(folder)


def saved_parameters(hf_config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the parameters that `save_pretrained` writes, name -> shape, and the ties.

    Ties are tied name -> saved name. The model is built without memory for its weights. Raises
    ModelError where the saved form cannot be described (kit/huggingface/saved.py).
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hybridflow.kit.huggingface.saved import SavedForm

    # Tensors on this device have shapes alone.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    form = SavedForm.of(model)
    return dict(form.shapes), dict(form.ties)
