"""Training over ranks against single-process Hugging Face and torch's own AdamW; tensors by name."""

from __future__ import annotations

import attrs
import pytest
import torch

from helpers.training_jobs import Setup, train
from helpers.training_reference import hf_loss, load, make_batch
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout


def output_ranks(layout: ParallelLayout) -> list[int]:
    """Those whose results count: of each replica the last stage's first."""
    return [layout.rank(dp=i, pp=layout.pp - 1) for i in range(layout.dp)]


def step_like_torch(model, batch, loss, kind, optimizer: OptimizerConfig, steps, temperature=1.0):
    """(gradients of the first step, losses, norms) of torch's own AdamW and clipping on the reference model."""
    adamw = torch.optim.AdamW(
        model.parameters(), lr=optimizer.lr, eps=optimizer.eps, weight_decay=0.0
    )
    losses, norms, grads, terms = [], [], {}, []
    for step in range(steps):
        adamw.zero_grad()
        value, found = hf_loss(model, batch, loss, kind, temperature)
        value.backward()
        if not step:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm))
        )
        adamw.step()
        losses.append(float(value.detach()))
        terms.append({n: float(v.detach()) for n, v in found.items()})
    return grads, losses, norms, terms


def close(got: torch.Tensor, want: torch.Tensor, relative: float, what: str) -> None:
    worst = (got.float() - want).abs().max()
    assert worst <= relative * want.abs().max(), f"{what}: {worst / want.abs().max():.2e}"


def check(ranks, folder, name, setup: Setup, loss, rows=7, steps=3, wide=1e-5):
    """Loss, terms, gradients, norm and parameters after `steps` equal Hugging Face's."""
    path = folder(name, setup.kind)
    setup = attrs.evolve(setup, path=path)
    batch = make_batch(rows)
    got = ranks(train, setup.layout.world, setup, [(batch, loss)], steps)
    model = load(path, setup.kind)
    grads, losses, norms, terms = step_like_torch(
        model, batch, loss, setup.kind, setup.optimizer, steps, setup.temperature
    )
    sources = [got[rank] for rank in output_ranks(setup.layout)]
    evaluated = Metrics.merge([s["evaluated"] for s in sources]).values()
    for term, value in {**terms[0], "loss": losses[0]}.items():
        assert evaluated[term] == pytest.approx(value, rel=wide, abs=1e-6), term
    for step in range(steps):
        metrics = Metrics.merge([s["metrics"][step] for s in sources]).values()
        assert metrics["loss"] == pytest.approx(losses[step], rel=wide, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norms[step], rel=1e-6 if not step else wide)
        for term, value in terms[step].items():
            assert metrics[term] == pytest.approx(value, rel=wide, abs=1e-6), term
    after = dict(model.named_parameters())
    for answer in got:
        assert answer["version"] == steps
        assert set(answer["grads"]) == set(grads)
        for parameter, want in grads.items():
            close(answer["grads"][parameter], want, wide, f"gradient of {parameter}")
            close(answer["parameters"][parameter], after[parameter].detach(), 5 * wide, parameter)
            assert torch.equal(answer["parameters"][parameter], got[0]["parameters"][parameter])


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
