"""What is wrong with a model's config, found by building it without memory for its weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from hybridflow.core.errors import ModelError
from hybridflow.core.names import did_you_mean
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.huggingface.config import LoRAConfig

OF_FILES = ("model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Fields that a config.json has beside its architecture's own."""
OF_ENGINES = ("moe_layer_freq", "scoring_func", "topk_method")
"""Fields of DeepSeek's that vLLM and SGLang read, and transformers does not."""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
"""Names of the field that names an activation."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""The sizes of most architectures, each at least 1."""
ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")
"""Types that attend to earlier tokens alone whatever their field is_decoder says."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Names of the number of layers."""
MOST_LAYERS, MOST = 1000, 10**8
"""What a larger number is a mistake of: layers, and anything else. Models of more are not built."""
KINDS = {"policy": "causal language model", "value": "classifier", "score": "classifier"}
"""Kind of model -> what of transformers' it is."""


def model_problems(model: ModelSpec) -> list[str]:
    """Return why the model cannot be built or run: its type, its fields, their values and sizes.

    transformers builds it on the meta device and passes two tokens through it, so that shapes that
    do not fit are found. Where transformers is not imported yet this takes some three seconds, and
    the second time no time.
    """
    problems, _ = _checked(_key(model), model.path, model.kind)
    return list(problems)


def meta_model(model: ModelSpec) -> Any:
    """Return the Hugging Face model on the meta device, for a model without `model_problems`.

    It is shared: look at it, and change nothing.
    """
    _, found = _checked(_key(model), model.path, model.kind)
    return found


def adapter_problems(model: ModelSpec, config: LoRAConfig | None) -> list[str]:
    """Return why the model cannot have adapters: peft is missing, or it has no such layers.

    For a model without `model_problems`.
    """
    if config is None:
        return []
    if find_spec("peft") is None:
        return ["backend.lora needs peft, which is not installed: pip install 'hybridflow[lora]'"]
    from hybridflow.kit.huggingface.lora import inject

    try:
        inject(copy.deepcopy(meta_model(model)), config)
    except ModelError as error:
        return [str(error)]
    return []


def _key(model: ModelSpec) -> str:
    return json.dumps(model.hf_config, sort_keys=True, default=str)


@lru_cache(maxsize=32)
def _checked(text: str, path: str | None, kind: str) -> tuple[tuple[str, ...], Any]:
    """Return the problems, and the model on meta where there are none."""
    from hybridflow.kit.huggingface.modeling import hf_config

    fields = json.loads(text)
    problems = [*_wrong_type(fields, kind), *_impossible(fields)]
    if problems:
        return tuple(problems), None
    found = None
    try:
        with _warnings() as warnings:
            config = hf_config(ModelSpec(fields, path, 0, kind))
        problems += [f"model.config: {text}; correct them" for text in warnings]
        problems += _wrong_kind(config)
        # A folder's config.json is another program's: it may hold what only that one reads.
        if path is None:
            problems += _unknown(fields, config, kind)
        if not problems:
            found = _run_on_meta(config, kind)
    except ModelError as error:
        problems.append(str(error))
    return tuple(problems), found


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what transformers warns of that is a mistake, and print none of its warnings.

    Of the fields inside rope_parameters it says itself which it does not know.
    """
    collected: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text.startswith("Unrecognized keys"):
                collected.append(text)

    logger = logging.getLogger("transformers")
    handlers = logger.handlers
    logger.handlers = [Collector()]
    try:
        yield collected
    finally:
        logger.handlers = handlers


def _wrong_type(fields: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield a sentence where transformers has no such architecture, or no such model of it.

    The config is not built for it: those of some vision models ask the hub for a backbone.
    """
    from transformers import CONFIG_MAPPING

    from hybridflow.kit.huggingface.models import auto_class

    name = fields.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        meant = did_you_mean(name, CONFIG_MAPPING) if isinstance(name, str) else ""
        yield f"model.config.model_type is {name!r}, which transformers does not know{meant}"
    elif CONFIG_MAPPING[name] not in auto_class(kind)._model_mapping:
        yield f"transformers has no {KINDS[kind]} of a {name}; take another architecture"


def _impossible(fields: Mapping[str, Any], inside: str = "model.config") -> Iterator[str]:
    """Yield a sentence for each number that no model has."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _impossible(value, f"{inside}.{name}")
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{inside}.{name} is {value}; give a finite number"
        elif name in SIZES and isinstance(value, int) and value < 1:
            yield f"{inside}.{name} is {value}; give at least 1"
        elif isinstance(value, int) and value > (most := MOST_LAYERS if name in LAYERS else MOST):
            yield f"{inside}.{name} is {value}; give at most {most}"


def _wrong_kind(config: Any) -> Iterator[str]:
    """Yield a sentence where the model is no decoder alone, or reads what is to come.

    And for what transformers says too little of, or too late: an activation that there is not, a
    token for padding beyond the vocabulary, and latent attention with groups of heads.
    """
    from transformers.activations import ACT2FN

    name = config.model_type
    if config.is_encoder_decoder:
        yield f"a {name} has an encoder and a decoder; take a model that is a decoder alone"
    elif getattr(config, "is_decoder", True) is False and name not in ALWAYS_CAUSAL:
        yield f"a {name} reads the tokens that come after each; set model.config.is_decoder = true"
    padding = getattr(config, "pad_token_id", None)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(padding, int) and isinstance(vocabulary, int) and padding >= vocabulary:
        yield (
            f"model.config.pad_token_id is {padding}, beyond the vocabulary of {vocabulary}; "
            "give one that it has"
        )
    heads, groups = (_size(config, f"num_{of}_heads") for of in ("attention", "key_value"))
    if _size(config, "kv_lora_rank") is not None and groups != heads:
        yield (
            f"model.config.num_key_value_heads is {groups}, and latent attention has as many as "
            f"num_attention_heads, {heads}"
        )
    for field in ACTIVATIONS:
        activation = getattr(config, field, None)
        if isinstance(activation, str) and activation not in ACT2FN:
            meant = did_you_mean(activation, ACT2FN)
            known = ", ".join(sorted(ACT2FN))
            yield f"model.config.{field} is {activation!r}{meant} (known: {known})"


def _size(config: Any, name: str) -> Any:
    """Return a field's value; None where the architecture has none, or one for each layer."""
    return vars(config).get(config.attribute_map.get(name, name))


def _run_on_meta(config: Any, kind: str) -> Any:
    """Return the model, through which two tokens have passed. Raises ModelError."""
    from hybridflow.kit.huggingface.modeling import model_errors, running_config
    from hybridflow.kit.huggingface.models import auto_class

    found = {name: _size(config, name) for name in SIZES}
    sizes = ", ".join(f"{name} {size}" for name, size in found.items() if size is not None)
    what = f"a {config.model_type} model of these sizes cannot be built ({sizes})"
    with (
        model_errors(what),
        _warnings(),
        torch.random.fork_rng(devices=[]),
        torch.device("meta"),
        torch.no_grad(),
    ):
        # Experts are multiplied in groups, which the meta device knows in bfloat16.
        model = auto_class(kind).from_config(running_config(config), dtype=torch.bfloat16)
        ids = torch.zeros(1, 2, dtype=torch.int64)
        try:
            model(input_ids=ids, use_cache=False)
        except Exception as error:
            # Some models look at values, and there are none on meta.
            if not isinstance(error, NotImplementedError) and "meta" not in str(error):
                raise
    return model


def _unknown(fields: Mapping[str, Any], config: Any, kind: str) -> Iterator[str]:
    """Yield a sentence for each field that neither the config's class nor the model reads."""
    from hybridflow.kit.huggingface.models import auto_class

    own = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    model = auto_class(kind)._model_mapping.get(type(config), None)
    source = "".join(
        inspect.getsource(sys.modules[part.__module__])
        for part in (type(config), model)
        if part is not None
    )
    for name in fields:
        if name in {*own, *OF_FILES, *OF_ENGINES} or re.search(rf"\b{re.escape(name)}\b", source):
            continue
        if _matters(name, fields, config):
            continue
        yield (
            f"model.config.{name} is no field of a {config.model_type} config"
            f"{did_you_mean(name, own) or '; remove it'}"
        )


def _matters(name: str, fields: Mapping[str, Any], config: Any) -> bool:
    """Return whether a field changes another one than itself (rope_theta: rope_parameters)."""
    from transformers import AutoConfig

    others = {key: value for key, value in fields.items() if key != name}
    try:
        with _warnings():
            without = AutoConfig.for_model(**others).to_dict()
    except Exception:
        # The others are wrong without it.
        return True
    return any(value != without.get(key) for key, value in config.to_dict().items() if key != name)
