"""Forward and backward passes through the contract of a training backend, and their references.

The reference is the same model in Hugging Face's code, differentiated by torch's autograd. The
contract gives no access to gradients, so `gradients` reads them off the step of an optimizer
(`memoryless`) that moves every weight by an invertible function of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.core.contracts.training import MicroBatch, OptimizerConfig, Packing, TrainingBackend
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.micro_batch import dummy_micro_batch, make_micro_batch
from hybridflow.kit.testing.models import Reference, Sequences

Plan = Sequence[Sequence[int]]
"""The rows of each micro-batch."""


@contextmanager
def one_rank(device: str = "cpu", role: str = "conformance") -> Iterator[RankContext]:
    """Yield the context of a single rank.

    It has a torch.distributed process group of one, which is made where none is there yet, and then
    destroyed at the end.
    """
    starts_group = not dist.is_initialized()
    if starts_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layout = ParallelLayout()
        generation = generation_layout(layout)
        yield RankContext(role, 0, layout, torch.device(device), generation=generation)
    finally:
        if starts_group:
            dist.destroy_process_group()


def memoryless(lr: float = 1e3) -> OptimizerConfig:
    """Return AdamW without memory, clipping and decay.

    Its moments are those of the last gradient g alone (both betas are 0), so that a step moves a
    weight by lr g / (|g| + eps), with eps = 1e3.
    """
    return OptimizerConfig(lr=lr, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0, max_grad_norm=0.0)


class Passes:
    """Passes of one backend over the same rows.

    The loss is the sum of all outputs times fixed coefficients: random ones for outputs per token,
    (row + 1) / rows for scores.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        rows: Sequences,
        temperature: float = 1.0,
        seed: int = 0,
        topk_ids: list[torch.Tensor] | None = None,
        packing: Packing | None = None,
    ):
        """packing: how rows lie in micro-batches; by default as the backend takes them."""
        self.backend = backend
        self.packing = packing
        self.rows = rows
        self.temperature = temperature
        self.topk_ids = topk_ids
        """int64 [T, K] per row: the tokens that topk_logprobs are asked of."""
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.randn(len(response), generator=generator) / len(rows)
            for response in rows.responses
        ]
        """float32 [T] per row: the loss's coefficients."""
        self.called: list[int] = []
        """The micro-batches whose loss the last `backward` asked for."""

    def micros(
        self,
        plan: Plan | None = None,
        dummies: int = 0,
    ) -> tuple[Plan, list[MicroBatch]]:
        """Return the plan (by default one micro-batch with all rows) and its micro-batches.

        `dummies` dummy micro-batches come behind them, whose loss is multiplied by 0.
        """
        plan = [list(range(len(self.rows)))] if plan is None else plan
        device = self.backend.context.device
        topk = None if self.topk_ids is None else tokens(self.topk_ids, torch.int64)
        prompts = tokens(self.rows.prompts)
        responses = tokens(self.rows.responses)

        packing = self.packing or self.backend.packing
        micros = []
        for rows in plan:
            index = np.asarray(rows)
            micro = make_micro_batch(prompts, responses, index, device, topk, packing=packing)
            micros.append(micro)
        for _ in range(dummies):
            micros.append(dummy_micro_batch(device, 0 if topk is None else 3))
        return plan, micros

    def raw(
        self, needs: Sequence[str], plan: Plan | None = None, dummies: int = 0
    ) -> list[dict[str, torch.Tensor]]:
        """Return the backend's outputs as they are, padded, one dict per micro-batch."""
        _, micros = self.micros(plan, dummies)
        return self.backend.forward(micros, list(needs), self.temperature)

    def outputs(
        self, needs: Sequence[str], plan: Plan | None = None, dummies: int = 0
    ) -> dict[str, list[torch.Tensor]]:
        """Return output -> one tensor per row without padding, on the CPU."""
        # The default plan is one micro-batch.
        plan, _ = self.micros(plan)
        by_row: dict[str, list[torch.Tensor]] = {}

        # Dummies have no rows: their outputs lie behind those of the plan and are left out.
        for rows, outputs in zip(plan, self.raw(needs, plan, dummies), strict=False):
            for name, values in outputs.items():
                per_row = by_row.setdefault(name, [torch.empty(0)] * len(self.rows))
                for i, row in enumerate(rows):
                    length = len(self.rows.responses[row])
                    value = values[i] if name == "scores" else values[i, :length]
                    per_row[row] = value.cpu()
        return by_row

    def backward(
        self,
        needs: Sequence[str],
        plan: Plan | None = None,
        dummies: int = 0,
    ) -> None:
        """Run forward_backward once; the backend accumulates the gradients."""
        plan, micros = self.micros(plan, dummies)
        self.called = []

        def loss(index: int, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            """Return the share of micro-batch `index`, which has a graph even for a dummy."""
            self.called.append(index)
            if micros[index].dummy:
                zeros = (output.sum() * 0.0 for output in outputs.values())
                return sum(zeros, torch.zeros(()))

            # One number per output and row of this micro-batch.
            shares = []
            for name in needs:
                for i, row in enumerate(plan[index]):
                    shares.append(self._share(outputs[name], row, i))
            return torch.stack(shares).sum()

        self.backend.forward_backward(micros, list(needs), loss, self.temperature)

    def _share(self, output: torch.Tensor, row: int, index: int) -> torch.Tensor:
        """Return a row's part of the loss; `output` [B, T] or [B] has the row at `index`."""
        if output.dim() == 1:  # scores
            return output[index] * (row + 1) / len(self.rows)
        weights = self.weights[row].to(output.device)
        return (output[index, : len(weights)] * weights).sum()

    def expected(self, ref: Reference, row: int) -> dict[str, torch.Tensor]:
        """Return the reference's outputs of a row, as Reference.outputs gives them."""
        prompt = self.rows.prompts[row]
        response = self.rows.responses[row]
        with torch.no_grad():
            return ref.outputs(prompt, response, self.temperature)

    def expected_gradients(self, ref: Reference, needs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the gradients by Hugging Face's model and autograd, by canonical name."""
        return ref.saved(self.model_gradients(ref, needs))

    def model_gradients(self, ref: Reference, needs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the gradients of the parameters that the reference runs with, by their names."""
        # The model is shared within the process: its gradients are cleared before and after.
        ref.model.zero_grad()
        total = torch.zeros(())
        rows = zip(self.rows.prompts, self.rows.responses, strict=True)
        for row, (prompt, response) in enumerate(rows):
            outputs = ref.outputs(prompt, response, self.temperature)
            for name in needs:
                share = self._share(outputs[name][None], row, 0)
                total = total + share
        total.backward()

        gradients = {}
        for name, parameter in ref.model.named_parameters():
            grad = parameter.grad
            gradients[name] = torch.zeros_like(parameter) if grad is None else grad.clone()
        ref.model.zero_grad()
        return gradients


def whole_weights(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    """Return a copy of all parameters by canonical name.

    It copies, for a tensor of full_parameters is good only until the next one.
    """
    return {name: values.detach().clone() for name, values in backend.full_parameters()}


def gradients(
    passes: Passes,
    needs: Sequence[str],
    plan: Plan | None = None,
    dummies: int = 0,
    times: int = 1,
) -> dict[str, torch.Tensor]:
    """Return the gradients of `times` backward passes, float32 by canonical name.

    They are read off the step of a backend that was built with `memoryless`.
    """
    backend = passes.backend
    # One step after all passes shows the accumulated gradients.
    before = whole_weights(backend)
    for _ in range(times):
        passes.backward(needs, plan, dummies)
    backend.optim_step()
    config = backend.optimizer_config
    assert config is not None

    # A step moves a weight by m = lr g / (|g| + eps), which has the sign of g. So
    # |m| (|g| + eps) = lr |g|, and g = m eps / (lr - |m|).
    by_name = {}
    for name, after in backend.full_parameters():
        moved = (before[name] - after.detach()).double().cpu()
        room = config.lr - moved.abs()
        by_name[name] = (moved * config.eps / room).float()
    return by_name


def optimizer_step(
    ref: Reference, config: OptimizerConfig
) -> Callable[..., tuple[float, dict[str, torch.Tensor]]]:
    """Return a function (passes, needs, step) -> (gradient norm, weights after the step).

    It takes the backend's steps by torch's AdamW on a copy of the reference.
    """
    import copy

    # The reference itself stays as it was, since other tests use it.
    model = copy.deepcopy(ref.model)
    twin = Reference(ref.spec, model, ref.parameters, None)
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(
        named.values(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )

    def take_step(
        passes: Passes, needs: Sequence[str], step: int
    ) -> tuple[float, dict[str, torch.Tensor]]:
        for name, gradient in passes.model_gradients(twin, needs).items():
            named[name].grad = gradient
        norm = float(torch.nn.utils.clip_grad_norm_(named.values(), config.max_grad_norm))

        # Step at this step's learning rate, as the backend does.
        for group in adamw.param_groups:
            group["lr"] = config.lr_at(step)
        adamw.step()
        adamw.zero_grad()
        return norm, ref.saved({name: values.detach().clone() for name, values in named.items()})

    return take_step
