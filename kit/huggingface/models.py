"""Hugging Face's side of a ModelSpec: its config object, its folder, and the saved parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec


def auto_class(kind: str) -> Any:
    """Return transformers' auto class for a kind of model: a causal LM or a classifier."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification


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


def attention_of(hf_config: Any) -> str:
    """Return the attention of transformers that is correct for a causal model: "sdpa" or "eager".

    torch's kernels support neither sinks (gpt_oss), for which transformers raises an error, nor
    capped scores (gemma2), which it silently ignores.
    """
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    capped = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped or not getattr(model_class, "_supports_sdpa", True):
        return "eager"
    return "sdpa"


PACKABLE = frozenset(
    {
        "apertus", "arcee", "cohere", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe",
        "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "granitemoe", "helium",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "minimax_m2", "ministral3", "mistral",
        "mixtral", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Model types whose packed rows are known not to attend to each other.

tests/kit/huggingface/test_attention.py shows it for each. Some types that take the arguments fail
it (nemotron), so no other type is packed.
"""


WINDOWS = {"mistral": 4096}
"""The sliding window of the types that have one unless their config says otherwise."""
SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Types whose window counts only with use_sliding_window, which is false by default."""


def why_padded(fields: Mapping[str, Any]) -> str | None:
    """Return why a trainer pads the rows of a model; None where it packs them.

    fields: those of its config, which need not be complete; transformers is not imported.
    """
    kind = fields["model_type"]
    if kind not in PACKABLE:
        return f"packed rows of a {kind} are not known to be apart"
    if fields.get("attn_logit_softcapping") is not None:
        return "its attention scores are capped"

    # Packed rows support only attention to all earlier tokens.
    partial = set(fields.get("layer_types") or ()) - {"full_attention"}
    window = fields.get("sliding_window", WINDOWS.get(kind))
    if kind in SWITCHED and not fields.get("use_sliding_window", False):
        window = None
    if partial or window:
        return "some layers attend to a part of a row"
    return None


def longest(hf_config: Any, max_length: int) -> int:
    """Return the largest number of tokens of a prompt with its response: `max_length`, unless 0.

    Raises ModelError where that is 0 and the model names no limit of its own (bloom has none).
    """
    limit = max_length or getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        raise ModelError(
            f"the config of this {hf_config.model_type} names no longest sequence "
            "(max_position_embeddings); set rollout.max_length"
        )
    return int(limit)


def keeps_state(hf_config: Any) -> bool:
    """Return whether some layers keep a state instead of keys and values (mamba, qwen3_next)."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    return bool(getattr(model_class, "_is_stateful", False))


def head_size(hf_config: Any) -> int:
    """Return the numbers of an attention head's query, by the config's fields."""
    config = hf_config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def windows_of(hf_config: Any, length: int) -> int:
    """Return the number of layers whose sliding window is shorter than sequences of `length`."""
    config = hf_config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not window or window >= length:
        return 0
    # Without a list of kinds all layers have the window (mistral, phi3, starcoder2).
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return int(config.num_hidden_layers)
    return sum(kind == "sliding_attention" for kind in kinds)


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
