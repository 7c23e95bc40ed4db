"""Every loss of every algorithm, on packed rows and on padded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.training import Packing, TrainingBackend
from hybridflow.core.plugins import registry
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, as_column, tokens
from hybridflow.core.workers.gradients import LossPart, agree, loss_metrics
from hybridflow.kit.testing.models import VOCAB, Reference, reference
from hybridflow.kit.testing.passes import memoryless, whole_weights
from hybridflow.kit.testing.random_columns import RowShapes, standard_column

ROWS = 8
SETTINGS: dict[str, dict[str, Any]] = {"safe_rlhf": {"cost_limit": 0.0}}
"""What an algorithm needs to be made."""


def every_loss() -> Iterator[tuple[str, Loss]]:
    """Yield (algorithm and role, loss)."""
    for name in registry().names("algorithm"):
        plugin = registry().get("algorithm", name)
        config: Any = registry().config_class("algorithm", name)
        for role, loss in plugin(config(**SETTINGS.get(name, {}))).losses().items():
            yield f"{name}/{role}", loss


LOSSES = dict(every_loss())


def kind_of(loss: Loss) -> str:
    """The kind of model that has the outputs of a loss."""
    if "scores" in loss.needs:
        return "score"
    return "value" if "values" in loss.needs else "policy"


def batch_for(loss: Loss, logprobs: torch.Tensor, lengths: np.ndarray) -> Batch:
    """Random rows with what a loss reads. Earlier logprobs lie around the model's: few ratios are clipped.

    logprobs: of the rows' response tokens, in order.
    """
    size = 1 if loss.unit == "row" else 2
    shape = RowShapes(
        lengths,
        np.repeat(np.arange(ROWS // size), size),
        loss.unit,
        torch.Generator().manual_seed(3),
    )
    names = dict.fromkeys(("loss_mask", *loss.reads))
    if loss.unit != "row":
        names[loss.unit] = None
    if "topk_logprobs" in loss.needs:
        names["topk_ids"] = None
    columns = {}
    for name in names:
        column = as_column(standard_column(name, shape))
        if name.endswith("logprobs") and not name.endswith("topk_logprobs"):
            noise = torch.as_tensor(shape.per_token().values)
            column = Column(logprobs + 0.05 * noise, lengths)
        if name == "topk_ids":
            column = Column(torch.as_tensor(column.values) % VOCAB, lengths)
        columns[name] = column
    return Batch({**rows_of(lengths), **columns})


def rows_of(lengths: np.ndarray) -> dict[str, Column]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: torch.randint(0, VOCAB, (int(n),), generator=generator)  # noqa: E731
    distinct = [draw(n) for n in (3, 1, 6, 2)]
    prompts = [distinct[at] for at in (0, 0, 1, 1, 2, 0, 0, 3)]
    return {"prompt_ids": tokens(prompts), "response_ids": tokens([draw(n) for n in lengths])}


LENGTHS = np.array([5, 9, 2, 7, 5, 5, 1, 12])
"""Response tokens. The prompts of rows 0, 1, 5 and 6 are the same, and those of rows 2 and 3."""


def same_packed_and_padded(
    build: Callable[..., TrainingBackend], loss: Loss, architecture: str = "qwen2"
):
    """Require equal figures and gradients, to 1e-5 of the largest entry of each parameter."""
    ref: Reference = reference(architecture, kind_of(loss))
    logprobs = torch.zeros(int(LENGTHS.sum()))
    if ref.spec.kind == "policy":
        rows = rows_of(LENGTHS)
        pairs = zip(rows["prompt_ids"], rows["response_ids"], strict=True)
        with torch.no_grad():
            logprobs = torch.cat(
                [ref.outputs(*map(torch.as_tensor, pair))["logprobs"] for pair in pairs]
            )
    batch = batch_for(loss, logprobs, LENGTHS)

    found = []
    for packed in (True, False):
        backend = build(ref.spec, memoryless(1e5))
        assert backend.packing is not Packing.PADDED
        packing = backend.packing if packed else Packing.PADDED
        part = LossPart(batch, loss, 60, backend.context, packing=packing)
        agree([part])
        assert any(micro.packed for micro in part.micros) == packed
        shared = packing is Packing.SHARED
        assert any(bool(micro.shared.any()) for micro in part.micros) == shared
        before = whole_weights(backend)
        metrics = loss_metrics([part.run(backend, 1.0, train=True)], backend.context)
        norm = backend.optim_step()["grad_norm"]
        moves = {
            name: before[name].double() - w.double() for name, w in whole_weights(backend).items()
        }
        config = backend.optimizer_config
        gradients = {n: m * config.eps / (config.lr - m.abs()) for n, m in moves.items()}
        found.append(({**metrics.values(), "norm": norm}, gradients))

    (figures, gradients), (expected_figures, expected) = found
    assert figures.keys() == expected_figures.keys()
    assert expected_figures["norm"] > 0
    for name, value in expected_figures.items():
        assert abs(figures[name] - value) <= 1e-5 * max(1.0, abs(value)), (
            name,
            figures[name],
            value,
        )
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((gradients[name] - gradient).abs().max()) <= 1e-5 * scale, name
