"""Weights from files: bit for bit those of Hugging Face's folder, and of the trainer that wrote a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.saved.backend import SavedBackend
from hybridflow.backends.saved.config import SavedConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.errors import CheckpointError, HybridFlowError, ModelError
from hybridflow.core.values.model import ModelSpec
from hybridflow.kit.huggingface.config import LoRAConfig
from hybridflow.kit.testing import one_rank
from hybridflow.kit.testing.runs import MODEL

EXPERTS = {
    **MODEL, "model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "head_dim": 8,
}  # fmt: skip


@pytest.fixture
def context():
    with one_rank(role="actor") as context:
        yield context


def spec_of(folder) -> ModelSpec:
    import json

    return ModelSpec(json.loads((folder / "config.json").read_text()), str(folder), 0)


def model_in(folder, fields=MODEL, dtype=torch.float32) -> ModelSpec:
    """A Hugging Face folder with random weights."""
    from transformers import AutoConfig

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype)
    model.save_pretrained(folder)
    return spec_of(folder)


def saved(spec, context, **config) -> SavedBackend:
    backend = SavedBackend(spec, SavedConfig(**config), None, context)
    backend.build()
    return backend


def values(backend) -> dict[str, torch.Tensor]:
    return {name: whole.clone() for name, whole in backend.full_parameters()}


def same(got, expected) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def trained(spec, context, folder, lora=None, precision="fp32") -> FSDPBackend:
    """A trainer whose weights differ from its folder's, with its checkpoint in `folder`."""
    backend = FSDPBackend(
        spec, FSDPConfig(lora=lora, precision=precision), OptimizerConfig(), context
    )
    backend.build()
    torch.manual_seed(5)
    with torch.no_grad():
        for name in backend._trained:
            backend.parameters[name].add_(torch.randn_like(backend.parameters[name]), alpha=0.1)
    backend.version = 7
    folder.mkdir()
    backend.save(folder).done(wait=True)
    return backend


@pytest.mark.parametrize("fields", [MODEL, EXPERTS], ids=["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_has_its_weights_in_their_dtype(tmp_path, context, fields, dtype):
    from safetensors.torch import load_file

    spec = model_in(tmp_path / "model", fields, dtype)
    backend = saved(spec, context)
    expected = load_file(tmp_path / "model/model.safetensors")
    same(values(backend), expected)

    # Shards are read when they are asked for, each as a whole or in part.
    for name, box, shard in backend.named_shards():
        assert torch.equal(shard[box.slices()], expected[name])
    assert backend.layout().params.keys() == expected.keys()
    assert backend.layout().ties == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("fields", [MODEL, EXPERTS], ids=["qwen2", "qwen3_moe"])
def test_a_checkpoint_has_the_trainer_s_weights(tmp_path, context, fields):
    spec = ModelSpec(fields, None, 0)
    trainer = trained(spec, context, tmp_path / "actor")
    backend = saved(spec, context, checkpoint=str(tmp_path / "actor"))
    same(values(backend), values(trainer))
    assert backend.version == 7


@pytest.mark.parametrize("files", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_of_a_checkpoint_are_merged_as_the_trainer_merges_them(
    tmp_path, context, files, precision
):
    pytest.importorskip("peft")
    spec = model_in(tmp_path / "model", dtype=files)
    lora = LoRAConfig(rank=4, alpha=8.0)
    trainer = trained(spec, context, tmp_path / "actor", lora, precision)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    backend = saved(spec, context, checkpoint=str(tmp_path / "actor"), lora=lora, dtype=dtype)
    same(values(backend), values(trainer))
    assert {param.dtype for param in backend.layout().params.values()} == {getattr(torch, dtype)}
    base = values(saved(spec, context, dtype=dtype))
    assert any(not torch.equal(whole, base[name]) for name, whole in values(backend).items())

    with pytest.raises(ModelError, match=r"set backend.lora"):
        saved(spec, context, checkpoint=str(tmp_path / "actor"))


def test_adapters_are_written_as_the_trainer_writes_them(tmp_path, context):
    from safetensors.torch import load_file

    pytest.importorskip("peft")
    spec = model_in(tmp_path / "model")
    lora = LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj",))
    trainer = trained(spec, context, tmp_path / "actor", lora)
    trainer.export_hf(tmp_path / "merged")
    backend = saved(spec, context, checkpoint=str(tmp_path / "actor"), lora=lora)
    backend.export_adapter(tmp_path / "adapter")
    own = load_file(tmp_path / "merged/adapter/adapter_model.safetensors")
    same(load_file(tmp_path / "adapter/adapter_model.safetensors"), own)
    whole = saved(spec, context)
    with pytest.raises(ModelError, match="is no checkpoint of adapters"):
        whole.export_adapter(tmp_path / "none")


def test_an_export_is_the_model(tmp_path, context):
    spec = model_in(tmp_path / "model")
    saved(spec, context).export_hf(tmp_path / "out")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    assert torch.equal(first(ids).logits, second(ids).logits)
    saved(spec, context).export_hf(tmp_path / "half", torch.bfloat16)
    half = values(saved(spec_of(tmp_path / "half"), context))
    same(half, {name: whole.bfloat16() for name, whole in values(saved(spec, context)).items()})


def test_it_computes_nothing(tmp_path, context):
    backend = saved(model_in(tmp_path / "model"), context)
    for call in (
        lambda: backend.forward([], ["logprobs"]),
        lambda: backend.forward_backward([], ["logprobs"], None),
        lambda: backend.optim_step(),
        lambda: backend.save(tmp_path),
        lambda: backend.load(tmp_path),
    ):
        with pytest.raises(HybridFlowError, match="actor: the backend saved reads weights"):
            call()


def test_a_checkpoint_of_a_critic_is_refused(tmp_path, context):
    spec = ModelSpec(MODEL, None, 0, "value")
    trained(spec, context, tmp_path / "critic")
    with pytest.raises(ModelError, match=r"score.weight"):
        saved(ModelSpec(MODEL, None, 0), context, checkpoint=str(tmp_path / "critic"))


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, context):
    with pytest.raises(CheckpointError, match=f"the checkpoint {tmp_path} of role 'actor'"):
        saved(ModelSpec(MODEL, None, 0), context, checkpoint=str(tmp_path))


def test_weights_stay_in_their_files(context):
    config = SavedConfig()
    size = SimpleNamespace(params=1e9)
    assert config.footprint(size, context.layout, False, 1).resident == 0
    assert config.model_shape({**MODEL}).layers == 2
