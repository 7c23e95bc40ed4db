"""LoRA against adapters written by hand on the Hugging Face model; what the ranks run, and what both backends are held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from helpers.hybrid_jobs import train_and_sync
from helpers.training_check import close, output_ranks, step_like_torch
from helpers.training_jobs import Setup, load_and_train, make_worker, mine, parameters, save_after
from helpers.training_reference import Blend, ValueLoss, load, make_batch
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.kit.huggingface.config import LoRAConfig

LORA = LoRAConfig(rank=4, alpha=12.0)
SOME = LoRAConfig(rank=3, alpha=3.0, target_modules=("q_proj", "layers.1.mlp.down_proj"))


def with_lora(setup: Setup, path: str, lora: LoRAConfig = LORA, **changes) -> Setup:
    return attrs.evolve(setup, path=path, config=attrs.evolve(setup.config, lora=lora), **changes)


class ByHand(nn.Module):
    """W -> W + scale B A, as a parametrization of torch's own."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float):
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * (self.b @ self.a)


def adapted(path: str, kind: str, folder: Path, lora: LoRAConfig) -> nn.Module:
    """The Hugging Face model with the adapters of an exported folder, and nothing else to train but a new head."""
    model = load(path, kind)
    model.requires_grad_(False)
    if kind != "policy":
        model.score.requires_grad_(True)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in sorted(tensors):
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            a, b = tensors[name], tensors[f"{layer}.lora_B.weight"]
            module = model.get_submodule(layer.removeprefix("base_model.model."))
            parametrize.register_parametrization(
                module, "weight", ByHand(a, b, lora.alpha / lora.rank)
            )
    return model


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its weights by their usual names."""
    found = {n: p for n, p in model.named_parameters() if ".parametrizations." not in n}
    found |= {
        f"{n}.weight": m.weight for n, m in model.named_modules() if parametrize.is_parametrized(m)
    }
    return {name: tensor.detach() for name, tensor in found.items()}


def train(
    rank: int, world: int, setup: Setup, batch: Batch, loss: Loss, steps: int, folder: str
) -> dict[str, Any]:
    """Exports before and after the updates, and the merged parameters at the end."""
    worker = make_worker(rank, setup)
    worker.export(f"{folder}/start")
    rows = mine(worker, batch)
    found = [worker.update([(rows, loss)]) for _ in range(steps)]
    worker.export(f"{folder}/end")
    return {"metrics": found, "parameters": parameters(worker)}


def dtypes(rank: int, world: int, setup: Setup) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Those of the model's parameters, and those of the adapters, after an update."""
    worker = make_worker(rank, setup)
    worker.update([(mine(worker, make_batch(8)), Blend())])
    backend = worker.backend
    return (
        {param.dtype for param in backend.layout().params.values()},
        {backend.parameters[name].dtype for name in backend._adapters.names},
    )


def check_training(ranks, setup: Setup, tmp_path: Path, steps: int = 3) -> None:
    """Loss, norm and merged weights after AdamW steps equal those of the adapters by hand; the rest has not moved."""
    lora, loss = setup.config.lora, Blend() if setup.kind == "policy" else ValueLoss()
    got = ranks(train, setup.layout.world, setup, make_batch(7), loss, steps, str(tmp_path))
    model = adapted(setup.path, setup.kind, tmp_path / "start" / "adapter", lora)
    start = {n: p.clone() for n, p in model.named_parameters()}
    assert all(p.abs().max() > 0.01 for n, p in start.items() if n.endswith("0.a"))
    assert not any(p.any() for n, p in start.items() if n.endswith("0.b"))
    if lora.target_modules:
        assert sum(n.endswith("0.a") for n in start) == 3
    _, losses, norms, _ = step_like_torch(
        model, make_batch(7), loss, setup.kind, setup.optimizer, steps
    )
    sources = [got[rank] for rank in output_ranks(setup.layout)]
    for step in range(steps):
        metrics = Metrics.merge([s["metrics"][step] for s in sources]).values()
        assert metrics["loss"] == pytest.approx(losses[step], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norms[step], rel=1e-5)
    before, after = dict(load(setup.path, setup.kind).named_parameters()), merged(model)
    assert set(got[0]["parameters"]) == set(before)
    for name, whole in got[0]["parameters"].items():
        if torch.equal(after[name], before[name]):
            assert torch.equal(whole, before[name]), name
        else:
            close(whole, after[name], 5e-5, name)
        for answer in got[1:]:
            assert torch.equal(answer["parameters"][name], whole), name
    check_exports(setup, tmp_path / "end", got[0]["parameters"])


def check_exports(setup: Setup, folder: Path, want: dict[str, torch.Tensor]) -> None:
    """The folder is the merged model, bit for bit; its adapter on the old one gives the same, by peft's own code."""
    from peft import PeftModel

    model = load(str(folder), setup.kind)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, want[name]), name
    if setup.kind != "policy":  # whose head is in the merged folder alone
        return
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(load(setup.path), str(folder / "adapter"))
        torch.testing.assert_close(
            theirs(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )


def check_sync(ranks, setup: Setup) -> None:
    """An engine has the merged weights, bit for bit, after every update."""
    setup = attrs.evolve(setup, engine="transformers")
    found = ranks(train_and_sync, setup.layout.world, setup, make_batch(8), Blend(), 2)
    for answer in found:
        assert (
            answer["wrong"] == []
            and answer["moved"] == answer["planned"]
            and answer["worst"] < 1e-4
        )
        assert answer["versions"] == {0, 1, 2} and answer["tokens"] == found[0]["tokens"]


def check_resume(ranks, setup: Setup, other: Setup, tmp_path: Path) -> None:
    """Bit for bit in the same layout; in another, and another backend, the same adapters; without the model's weights."""
    from hybridflow.kit.checkpoint_files import Index

    pairs = [(make_batch(8), Blend())]
    first = ranks(save_after, setup.layout.world, setup, pairs, 2, str(tmp_path / "c"), 2)[0]
    entries = set(Index.read(tmp_path / "c").entries)
    assert entries and all(".lora_A." in e or ".lora_B." in e for e in entries)
    second = ranks(load_and_train, setup.layout.world, setup, pairs, str(tmp_path / "c"), 2)[0]
    third = ranks(load_and_train, other.layout.world, other, pairs, str(tmp_path / "c"), 2)[0]
    for name, whole in first["end"].items():
        assert torch.equal(second["loaded"][name], first["saved"][name]), name
        assert torch.equal(second["end"][name], whole), name
        torch.testing.assert_close(
            third["loaded"][name], first["saved"][name], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(third["end"][name], whole, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(first["end"][n], first["saved"][n]) for n in first["end"])
