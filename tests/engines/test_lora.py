"""LoRA under DeepSpeed, and of two backends in one another's checkpoints."""

from __future__ import annotations

import attrs
import pytest
from helpers.lora_check import LORA, SOME, check_resume, check_sync, check_training, with_lora
from helpers.training_jobs import Setup

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.parallel import ParallelLayout

DP2 = ParallelLayout(dp=2)
FSDP = Setup("", layout=DP2, config=FSDPConfig())


def zero(stage: int, **config) -> Setup:
    pytest.importorskip("deepspeed")
    return Setup("", layout=DP2, backend="deepspeed", config=DeepSpeedConfig(stage=stage, **config))


@pytest.mark.parametrize(
    ("name", "stage", "config", "lora", "kind"),
    [
        ("qwen2-tied", 1, {}, LORA, "policy"),
        ("llama-odd", 2, {"offload_optimizer": True}, LORA, "policy"),
        ("qwen2-odd", 3, {"activation_checkpointing": True}, LORA, "policy"),
        ("llama", 3, {"persist_elements": 0}, SOME, "policy"),
        ("qwen2-tied", 3, {}, LORA, "value"),
    ],
    ids=str,
)  # fmt: skip
def test_adapters_train_as_by_hand(ranks, folder, tmp_path, name, stage, config, lora, kind):
    setup = attrs.evolve(zero(stage, **config), kind=kind)
    check_training(ranks, with_lora(setup, folder(name, kind), lora), tmp_path)


@pytest.mark.parametrize(("stage", "tp"), [(2, 1), (3, 2)])
def test_an_engine_gets_the_merged_weights(ranks, folder, stage, tp):
    check_sync(ranks, with_lora(zero(stage), folder("llama"), generation_tp=tp))


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_hold_adapters_alone_and_load_in_another_backend(
    ranks, folder, tmp_path, stage
):
    path = folder("qwen2-tied")
    check_resume(ranks, with_lora(zero(stage), path), with_lora(FSDP, path), tmp_path)


def test_a_checkpoint_of_fsdp_loads_under_zero_3(ranks, folder, tmp_path):
    path = folder("qwen2-tied")
    check_resume(
        ranks, with_lora(FSDP, path), with_lora(zero(3, persist_elements=0), path), tmp_path
    )
