"""DeepSpeed on one rank under the conformance kit; a role that only scores needs no DeepSpeed below stage 3."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.installed import needs
from helpers.one_rank_backends import InBfloat16, OneRank
from helpers.packed_rows import LOSSES, same_packed_and_padded
from helpers.paths import matrix
from helpers.zoo_cells import write_model
from safetensors.torch import load_file

from hybridflow.backends.deepspeed.backend import DeepSpeedBackend
from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.names import is_installed
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.testing import tiny_config

MODEL = ModelSpec(tiny_config("qwen2"), None, 0)


class Spread(OneRank):
    backend, config = DeepSpeedBackend, DeepSpeedConfig()


class TestFrozen(Spread):
    config, trains = DeepSpeedConfig(stage=2), False


@matrix
@needs("deepspeed")
class TestStage1(Spread):
    config = DeepSpeedConfig(stage=1)


@needs("deepspeed")
class TestStage2(Spread):
    config = DeepSpeedConfig(stage=2)


@needs("deepspeed")
class TestStage3(Spread):
    config = DeepSpeedConfig(stage=3)


@needs("deepspeed")
class TestStage3WithExperts(Spread):
    config = DeepSpeedConfig(stage=3)
    architectures = ("qwen3_moe",)
    kinds = ("policy",)


@matrix
@needs("deepspeed")
class TestOffloaded(Spread):
    config = DeepSpeedConfig(stage=2, offload_optimizer=True)


@needs("deepspeed")
class TestStage3InBfloat16(InBfloat16, Spread):
    config = DeepSpeedConfig(
        stage=3, precision="bf16", offload_optimizer=True, offload_parameters=True
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DeepSpeedConfig(stage=1, precision="bf16"), ["set backend.stage to 2 or 3"]),
        (DeepSpeedConfig(stage=1), []),
        (DeepSpeedConfig(stage=2, precision="bf16"), []),
    ],
)
def test_a_stage_that_deepspeed_has_in_float32_alone_is_named(config, said):
    found = DeepSpeedBackend.problems(config, ParallelLayout(dp=2), MODEL)
    assert len(found) == len(said) and all(
        part in text for part, text in zip(said, found, strict=True)
    )


def test_adapters_need_peft():
    found = DeepSpeedBackend.problems(
        DeepSpeedConfig(lora=LoRAConfig(rank=2)), ParallelLayout(), MODEL
    )
    remedy = "backend.lora needs peft, which is not installed: pip install 'hybridflow[lora]'"
    assert found == ([] if is_installed("peft") else [remedy])


@needs("deepspeed")
@pytest.mark.parametrize("name", LOSSES)
def test_packed_rows_train_as_padded_ones(name, alone):
    def build(spec, optimizer):
        made = DeepSpeedBackend(spec, DeepSpeedConfig(stage=2), optimizer, alone)
        made.build()
        return made

    same_packed_and_padded(build, LOSSES[name])


@needs("deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_buffers_of_a_checkpoint_are_weights_that_it_gives(stage, alone, tmp_path):
    """The bias by which glm4_moe chooses experts is no parameter."""
    path = write_model("glm4_moe", 3, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    spec = ModelSpec(fields, str(path), 0)
    backend = DeepSpeedBackend(spec, DeepSpeedConfig(stage=stage), OptimizerConfig(), alone)
    backend.build()
    given = load_file(path / "model.safetensors")
    assert set(backend.layout().params) == set(given)
    assert {name for name, _, _ in backend.named_shards()} == set(given)
    for name, values in backend.full_parameters():
        assert torch.equal(values, given.pop(name)), name
    assert not given
    backend.export_hf(tmp_path / "export")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    exported = load_file(tmp_path / "export/model.safetensors")[name]
    assert torch.equal(exported, load_file(path / "model.safetensors")[name])
    assert exported.abs().max() > 0.01
