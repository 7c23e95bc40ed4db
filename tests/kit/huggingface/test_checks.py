"""What is wrong with a model's config is said; what is right is not refused."""

from __future__ import annotations

import json
import socket

import pytest
import torch
from helpers.zoo import ZOO
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.huggingface.checks import adapter_problems, meta_model, model_problems
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.testing import tiny_config


def problems(kind: str = "policy", **fields) -> list[str]:
    whole = {"model_type": "qwen2", **tiny_config("qwen2"), **fields}
    return model_problems(
        ModelSpec({k: v for k, v in whole.items() if v != "absent"}, None, 0, kind)
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"hiden_size": 32},
            "hiden_size is no field of a qwen2 config; did you mean 'hidden_size'?",
        ),
        ({"speed": 3}, "speed is no field of a qwen2 config; remove it"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": None}, "'hidden_size' expected int, got NoneType"),
        ({"vocab_size": True}, "'vocab_size' expected int, got bool"),
        ({"num_attention_heads": 0}, "model.config.num_attention_heads is 0; give at least 1"),
        ({"num_hidden_layers": -2}, "model.config.num_hidden_layers is -2; give at least 1"),
        ({"rms_norm_eps": float("nan")}, "model.config.rms_norm_eps is nan; give a finite number"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "model.config.rope_parameters.rope_theta is inf; give a finite number",
        ),
        ({"rope_parameters": {"rope_type": "spiral"}}, "KeyError: 'spiral'"),
        ({"hidden_act": "silk"}, "hidden_act is 'silk'; did you mean 'silu'? (known: gelu,"),
        ({"num_key_value_heads": 3}, "Number of heads in key and value must divide"),
        # 32 heads are the default of a qwen2; none of them gets a number of 16.
        (
            {"num_attention_heads": "absent", "hidden_size": 16, "head_dim": "absent"},
            "num_attention_heads 32",
        ),
        ({"pad_token_id": 32}, "model.config.pad_token_id is 32, beyond the vocabulary of 32"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; give at most 1000"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; give at most 100000000"),
        ({"model_type": []}, "model_type is [], which transformers does not know"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "beta_afst": 1,
                }
            },
            "Unrecognized keys in `rope_parameters` for 'rope_type'='yarn': {'beta_afst'}",
        ),
        ({"layer_types": ["full_attention"]}, "`num_hidden_layers` (2) must be equal to"),
        ({"dtype": "float31"}, "has no attribute 'float31'"),
        ({"model_type": "qwen9"}, "'qwen9', which transformers does not know; did you mean"),
        ({"model_type": 7}, "model_type is 7, which transformers does not know"),
        ({"model_type": "t5"}, "no causal language model of a t5"),
        ({"model_type": "bart"}, "a bart has an encoder and a decoder"),
        ({"model_type": "bert"}, "set model.config.is_decoder = true"),
        ({"model_type": "clip"}, "transformers has no causal language model of a clip"),
    ],
)
def test_what_is_wrong_is_said(fields, said):
    assert any(said in text for text in problems(**fields)), problems(**fields)


def test_a_value_model_needs_a_classifier():
    granite = {**ZOO["granite"].config()}
    assert model_problems(ModelSpec(granite, None, 0)) == []
    [text] = model_problems(ModelSpec(granite, None, 0, "value"))
    assert "no classifier of a granite" in text


@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_of_the_zoo_is_right(name):
    assert model_problems(ModelSpec(ZOO[name].config(), None, 0)) == []


def test_fields_that_are_read_elsewhere_than_in_the_configs_class_are_known():
    """rope_theta becomes one of rope_parameters; a qwen2's model alone reads head_dim."""
    assert (
        problems(rope_theta=1e6, torch_dtype="bfloat16", architectures=["Qwen2ForCausalLM"]) == []
    )
    assert problems(head_dim=16) == []
    assert problems(transformers_version="4.0", use_cache=False, model_type="qwen2") == []


def test_a_folder_may_hold_fields_that_only_others_read(tmp_path):
    config = {**tiny_config("qwen2"), "model_type": "qwen2", "unsloth_version": "1"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_problems(ModelSpec(config, str(tmp_path), 0)) == []


def test_nothing_of_a_large_model_is_allocated_and_the_same_question_is_free(monkeypatch):
    large = {
        "hidden_size": 8192, "num_hidden_layers": 8, "intermediate_size": 28672, "vocab_size": 152064,
        "num_attention_heads": 64, "head_dim": 128,
    }  # fmt: skip
    assert problems(**large) == []
    model = meta_model(ModelSpec({**tiny_config("qwen2"), **large}, None, 0))
    assert all(parameter.is_meta for parameter in model.parameters())
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", None)
    assert problems(**large) == []


def test_random_numbers_stay_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert problems(hidden_size=48, head_dim=12) == []
    assert torch.equal(torch.rand(2), expected)


def test_latent_attention_has_no_groups():
    latent = ZOO["deepseek_v2"].config() | {"num_key_value_heads": 2}
    [text] = model_problems(ModelSpec(latent, None, 0))
    assert (
        "num_key_value_heads is 2, and latent attention has as many as num_attention_heads, 4"
        in text
    )


def test_peft_takes_the_names_of_deepseeks_mlps_for_those_of_its_experts():
    model = ModelSpec(ZOO["deepseek_v2"].config(), None, 0)
    [text] = adapter_problems(model, LoRAConfig(rank=2))
    assert "peft adapts other layers of a 'deepseek_v2' model than it is told" in text
    assert adapter_problems(model, LoRAConfig(rank=2, target_modules=("o_proj",))) == []


def test_adapters_need_peft_and_layers_of_their_names(monkeypatch):
    model = ModelSpec(tiny_config("qwen2"), None, 0)
    assert adapter_problems(model, None) == []
    named = LoRAConfig(target_modules=("q_proj",))
    assert adapter_problems(model, named) == []
    [text] = adapter_problems(model, LoRAConfig(target_modules=("qproj",)))
    assert "qproj" in text and "gate_proj" in text
    monkeypatch.setattr("hybridflow.kit.huggingface.checks.find_spec", lambda name: None)
    [text] = adapter_problems(model, named)
    assert "pip install 'hybridflow[lora]'" in text
    assert adapter_problems(model, None) == []


def test_the_types_that_attend_backwards_alone_do():
    """By a forward pass: a later token changes no earlier state."""
    for kind in ("gpt_neox", "gpt_neox_japanese"):
        small = {
            "vocab_size": 16,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        config = AutoConfig.for_model(kind, **small)
        assert config.is_decoder is False
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            a, b = (model(torch.tensor([[3, 4, last]])).logits[:, :2] for last in (5, 6))
        assert torch.equal(a, b)


def test_the_hub_is_not_asked_for_the_parts_of_a_model_that_is_refused(monkeypatch):
    asked: list[str] = []

    def lookup(host, *rest, **more):
        asked.append(host)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    config = {"model_type": "edgetam"}  # its backbone is a model of the hub's
    [said] = model_problems(ModelSpec(config, None, 0))
    assert said.startswith("transformers has no causal language model of a edgetam") and not asked
