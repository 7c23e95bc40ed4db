"""LoRA on FSDP2."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.hybrid_jobs import train_and_sync
from helpers.lora_check import (
    LORA,
    SOME,
    check_resume,
    check_sync,
    check_training,
    dtypes,
    with_lora,
)
from helpers.syncs import sync
from helpers.training_jobs import Setup, failing_build, failing_load, outputs, save_after
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.testing import tiny_config

ONE, DP2, DP4 = ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(dp=4)
MODEL = ModelSpec(tiny_config("qwen2"), None, 0)
PLAIN = Setup("", config=FSDPConfig())


@pytest.mark.parametrize(
    ("name", "layout", "config", "lora", "kind"),
    [
        ("qwen2-tied", ONE, FSDPConfig(), LORA, "policy"),
        ("qwen2-odd", DP2, FSDPConfig(activation_checkpointing=True), LORA, "policy"),
        ("llama", DP2, FSDPConfig(wrap_min_parameters=0), SOME, "policy"),
        ("llama-odd", DP4, FSDPConfig(replicas=2), LORA, "policy"),
        ("qwen2-tied", DP2, FSDPConfig(), LORA, "value"),
    ],
    ids=str,
)  # fmt: skip
def test_adapters_train_as_by_hand(ranks, folder, tmp_path, name, layout, config, lora, kind):
    setup = Setup("", kind=kind, layout=layout, config=config)
    check_training(ranks, with_lora(setup, folder(name, kind), lora), tmp_path)


@pytest.mark.parametrize(("layout", "tp"), [(ONE, 1), (DP2, 1), (DP2, 2)], ids=str)
def test_an_engine_gets_the_merged_weights(ranks, folder, layout, tp):
    check_sync(ranks, with_lora(PLAIN, folder("llama"), layout=layout, generation_tp=tp))


def test_checkpoints_hold_adapters_alone_and_load_on_other_ranks(ranks, folder, tmp_path):
    setup = with_lora(PLAIN, folder("qwen2-tied"), layout=DP2)
    check_resume(ranks, setup, attrs.evolve(setup, layout=ONE), tmp_path)


def test_bf16_stores_the_model_in_bf16_and_trains_float32_adapters(ranks, folder):
    config = FSDPConfig(precision="bf16")
    setup = with_lora(attrs.evolve(PLAIN, config=config), folder("llama"), layout=DP2)
    found = ranks(dtypes, 2, setup)[0]
    assert found == ({torch.bfloat16}, {torch.float32})
    synced = attrs.evolve(
        setup, engine="transformers", engine_config={"dtype": "bfloat16"}, sync=sync(verify=True)
    )
    for answer in ranks(train_and_sync, 2, synced, make_batch(8), Blend(), 2):
        assert answer["wrong"] == [] and answer["worst"] < 0.3


def test_a_frozen_role_has_no_adapters(ranks, folder):
    with_them = ranks(outputs, 1, with_lora(PLAIN, folder("llama"), optimizer=None), make_batch(6))[
        0
    ]
    without = ranks(
        outputs, 1, attrs.evolve(PLAIN, path=folder("llama"), optimizer=None), make_batch(6)
    )[0]
    assert torch.equal(with_them["logprobs"].values, without["logprobs"].values)


def test_what_cannot_be_adapted_is_told(ranks, folder, tmp_path, monkeypatch):
    config = FSDPConfig(lora=LORA)
    assert "lora needs tp 1" in FSDPBackend.problems(config, ParallelLayout(tp=2), MODEL)[0]
    assert FSDPBackend.problems(config, DP2, MODEL) == []
    wrong = LoRAConfig(target_modules=("q_proj", "qproj"))
    said = ranks(failing_build, 1, with_lora(PLAIN, folder("llama"), wrong))[0]
    assert "'qproj'" in said and "'gate_proj'" in said
    full = attrs.evolve(PLAIN, path=folder("llama"))
    ranks(save_after, 1, full, [], 0, str(tmp_path / "full"), 0)
    assert (
        "lora_A"
        in ranks(failing_load, 1, with_lora(PLAIN, folder("llama")), str(tmp_path / "full"))[0]
    )
    monkeypatch.setattr("hybridflow.kit.huggingface.checks.find_spec", lambda name: None)
    assert "pip install 'hybridflow[lora]'" in FSDPBackend.problems(config, DP2, MODEL)[0]
