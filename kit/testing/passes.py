"""Forwards and backwards through the contract of a training backend, beside the same by Hugging Face's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.core.contracts.training import MicroBatch, OptimizerConfig, TrainingBackend
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.micro_batch import dummy_micro_batch, make_micro_batch
from hybridflow.kit.testing.models import Reference, Sequences

Plan = Sequence[Sequence[int]]


@contextmanager
def one_rank(device: str = "cpu", role: str = "conformance") -> Iterator[RankContext]:
    """The context of a single rank, with a torch.distributed group of one where none is there yet."""
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layout = ParallelLayout()
        yield RankContext(
            role, 0, layout, torch.device(device), generation=generation_layout(layout)
        )
    finally:
        if mine:
            dist.destroy_process_group()


def memoryless(lr: float = 1e3) -> OptimizerConfig:
    """AdamW without memory: a step moves a weight by lr g / (|g| + 1e3); without clipping and decay."""
    return OptimizerConfig(lr=lr, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0, max_grad_norm=0.0)


class Passes:
    """Rows for one backend. The loss is the sum of all outputs times fixed random coefficients."""

    def __init__(
        self, backend: TrainingBackend, rows: Sequences, temperature: float = 1.0, seed: int = 0,
        topk_ids: list[torch.Tensor] | None = None,
    ):  # fmt: skip
        self.backend, self.rows, self.temperature, self.topk_ids = (
            backend,
            rows,
            temperature,
            topk_ids,
        )
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.randn(len(r), generator=generator) / len(rows) for r in rows.responses
        ]
        self.called: list[int] = []

    def micros(self, plan: Plan | None = None, dummies: int = 0) -> tuple[Plan, list[MicroBatch]]:
        plan = plan or [list(range(len(self.rows)))]
        device = self.backend.context.device
        topk = None if self.topk_ids is None else tokens(self.topk_ids, torch.int64)
        prompts, responses = tokens(self.rows.prompts), tokens(self.rows.responses)
        made = [make_micro_batch(prompts, responses, np.asarray(p), device, topk) for p in plan]
        return plan, made + [
            dummy_micro_batch(device, 0 if topk is None else 3) for _ in range(dummies)
        ]

    def raw(
        self, needs: Sequence[str], plan: Plan | None = None, dummies: int = 0
    ) -> list[dict[str, torch.Tensor]]:
        return self.backend.forward(self.micros(plan, dummies)[1], list(needs), self.temperature)

    def outputs(
        self, needs: Sequence[str], plan: Plan | None = None, dummies: int = 0
    ) -> dict[str, list[torch.Tensor]]:
        """Per row, without padding."""
        plan, _ = self.micros(plan)
        found: dict[str, list[torch.Tensor]] = {}
        for rows, outputs in zip(plan, self.raw(needs, plan, dummies), strict=False):
            for name, value in outputs.items():
                per_row = found.setdefault(name, [torch.empty(0)] * len(self.rows))
                for at, row in enumerate(rows):
                    per_row[row] = (
                        value[at].cpu()
                        if name == "scores"
                        else value[at, : len(self.rows.responses[row])].cpu()
                    )
        return found

    def backward(self, needs: Sequence[str], plan: Plan | None = None, dummies: int = 0) -> None:
        plan, micros = self.micros(plan, dummies)
        self.called = []

        def loss(at: int, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            self.called.append(at)
            if micros[at].dummy:
                return sum((o.sum() * 0.0 for o in outputs.values()), torch.zeros(()))
            shares = [
                self._share(outputs[n], row, i) for n in needs for i, row in enumerate(plan[at])
            ]
            return torch.stack(shares).sum()

        self.backend.forward_backward(micros, list(needs), loss, self.temperature)

    def _share(self, output: torch.Tensor, row: int, at: int) -> torch.Tensor:
        if output.dim() == 1:  # scores
            return output[at] * (row + 1) / len(self.rows)
        weights = self.weights[row].to(output.device)
        return (output[at, : len(weights)] * weights).sum()

    def expected(self, ref: Reference, row: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return ref.outputs(self.rows.prompts[row], self.rows.responses[row], self.temperature)

    def expected_gradients(self, ref: Reference, needs: Sequence[str]) -> dict[str, torch.Tensor]:
        """By Hugging Face's model and torch's autograd, under canonical names."""
        ref.model.zero_grad()
        total = torch.zeros(())
        for row, (prompt, response) in enumerate(
            zip(self.rows.prompts, self.rows.responses, strict=True)
        ):
            outputs = ref.outputs(prompt, response, self.temperature)
            for name in needs:
                output = outputs[name][None]
                total = total + (
                    output[0] * (row + 1) / len(self.rows)
                    if name == "scores"
                    else self._share(output, row, 0)
                )
        total.backward()
        named = dict(ref.model.named_parameters())
        found = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()
        }
        ref.model.zero_grad()
        return {n: found[n] for n in ref.parameters}


def whole_weights(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    """A copy of all parameters by canonical name (what full_parameters yields is good until the next one)."""
    return {name: p.detach().clone() for name, p in backend.full_parameters()}


def gradients(
    passes: Passes, needs: Sequence[str], plan: Plan | None = None, dummies: int = 0, times: int = 1
) -> dict[str, torch.Tensor]:
    """What forward_backward gathered, read off the move of the weights in one step (see `memoryless`)."""
    backend = passes.backend
    before = whole_weights(backend)
    for _ in range(times):
        passes.backward(needs, plan, dummies)
    backend.optim_step()
    config = backend.optimizer_config
    assert config is not None
    found = {}
    for name, after in backend.full_parameters():
        moved = (before[name] - after.detach()).double().cpu()
        found[name] = (moved * config.eps / (config.lr - moved.abs())).float()
    return found


def optimizer_step(
    ref: Reference, config: OptimizerConfig
) -> Callable[..., tuple[float, dict[str, torch.Tensor]]]:
    """A function (passes, needs, step) -> (gradient norm, weights after): the same steps by torch's AdamW on a copy."""
    import copy

    mine = copy.deepcopy(ref.model)
    twin = Reference(ref.spec, mine, ref.parameters, None)
    named = dict(mine.named_parameters())
    adamw = torch.optim.AdamW(
        named.values(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )

    def step(
        passes: Passes, needs: Sequence[str], at: int
    ) -> tuple[float, dict[str, torch.Tensor]]:
        for name, gradient in passes.expected_gradients(twin, needs).items():
            named[name].grad = gradient
        norm = float(torch.nn.utils.clip_grad_norm_(named.values(), config.max_grad_norm))
        for group in adamw.param_groups:
            group["lr"] = config.lr_at(at)
        adamw.step()
        adamw.zero_grad()
        return norm, {n: named[n].detach().clone() for n in ref.parameters}

    return step
