"""A ModelSpec as Hugging Face has it: config, folder, and the parameters that are saved."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen2Config

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.huggingface.models import (
    attention_of,
    hf_config_of,
    longest,
    policy_config,
    saved_parameters,
    windows_of,
    write_config,
)
from hybridflow.kit.testing.models import reference, tiny_config


def test_a_config_is_read_from_the_folder_or_made_of_its_fields(tmp_path):
    config = hf_config_of(ModelSpec(tiny_config(), None, 0))
    assert isinstance(config, Qwen2Config) and config.num_key_value_heads == 2
    config.num_key_value_heads = 4
    config.save_pretrained(tmp_path)
    assert hf_config_of(ModelSpec(tiny_config(), str(tmp_path), 0)).num_key_value_heads == 4


def test_an_engine_generates_with_a_policy_alone():
    assert policy_config(ModelSpec(tiny_config(), None, 0)).vocab_size == 32
    with pytest.raises(ModelError, match="generates with a policy; this model is a 'score' model"):
        policy_config(ModelSpec(tiny_config(), None, 0, "score"))


def test_a_written_config_names_the_class_of_the_model(tmp_path):
    write_config(hf_config_of(ModelSpec(tiny_config("llama"), None, 0)), str(tmp_path))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.architectures == ["LlamaForCausalLM"] and read.hidden_size == 32
    read.architectures = ["Mine"]  # what a folder says already stays
    write_config(read, str(tmp_path))
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Mine"]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_saved_parameters_are_those_of_the_files(architecture):
    spec = reference(architecture).spec
    files = load_file(f"{spec.path}/model.safetensors")
    shapes, ties = saved_parameters(policy_config(spec))
    assert shapes == {name: tuple(values.shape) for name, values in files.items()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    assert ties == (tied if architecture == "qwen2" else {})


def test_saved_parameters_take_no_memory_however_large_the_model():
    large = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    fields = tiny_config("llama") | large
    shapes, _ = saved_parameters(hf_config_of(ModelSpec(fields, None, 0)))
    assert shapes["model.layers.79.mlp.up_proj.weight"] == (28672, 8192)


def test_capped_scores_and_sinks_are_not_left_to_torchs_kernels():
    kinds = ["qwen2", "gemma2", "gpt_oss", "bloom"]
    found = {kind: attention_of(AutoConfig.for_model(kind)) for kind in kinds}
    assert found == {"qwen2": "sdpa", "gemma2": "eager", "gpt_oss": "eager", "bloom": "eager"}
    assert attention_of(AutoConfig.for_model("gemma2", attn_logit_softcapping=None)) == "sdpa"


def test_the_longest_sequence_is_given_or_the_models_own():
    config = hf_config_of(ModelSpec(tiny_config(), None, 0))
    assert [longest(config, 16), longest(config, 0)] == [16, 128]
    bloom = AutoConfig.for_model("bloom")
    assert longest(bloom, 16) == 16
    with pytest.raises(ModelError, match=r"this bloom names no longest .* set rollout.max_length"):
        longest(bloom, 0)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, 3),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "mistral", "sliding_window": 64}, 0),  # longer than any sequence
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, 0),
        ({"model_type": "gpt_oss", "sliding_window": 8}, 2),  # every second one, from the first on
        ({"model_type": "gpt2"}, 0),
    ],
)
def test_layers_with_sliding_windows_are_counted(fields, layers):
    config = hf_config_of(ModelSpec({"num_hidden_layers": 3, **fields}, None, 0))
    assert windows_of(config, 64) == layers
