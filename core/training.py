"""The contract of training backends: forward, forward-backward, optimizer step, and who holds which weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from hybridflow.core.metrics import Metrics
from hybridflow.core.model import ModelSpec
from hybridflow.core.weights import Box, WeightLayout


def _positive(instance, attribute, value):
    if value <= 0:
        raise ValueError(f"must be greater than 0, got {value}")


def _fraction(instance, attribute, value):
    if not 0 <= value <= 1:
        raise ValueError(f"must lie between 0 and 1, got {value}")


@attrs.frozen
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) with warm-up, decay and gradient clipping."""

    lr: float = attrs.field(default=1e-6, validator=_positive)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0 is off."""
    warmup_steps: int = 0
    """Optimizer steps over which lr rises linearly from 0."""
    schedule: str = attrs.field(default="constant", validator=attrs.validators.in_(("constant", "linear", "cosine")))
    """What follows the warm-up; linear and cosine end at min_lr_ratio * lr after total_steps."""
    total_steps: int = 0
    """Optimizer steps of the whole run, for linear and cosine."""
    min_lr_ratio: float = attrs.field(default=0.0, validator=_fraction)

    def __attrs_post_init__(self):
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule!r} needs total_steps > warmup_steps, got {self.total_steps} and {self.warmup_steps}"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        left = 1 - done if self.schedule == "linear" else 0.5 * (1 + float(torch.cos(torch.tensor(done * torch.pi))))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)


@attrs.frozen(eq=False)
class MicroBatch:
    """Rows for one forward. `ids` [B, S] int64: prompt then response, filled with 0 on the right.

    Position of response token t of row i is prompt_lengths[i] + t; T = longest response. A dummy (one row of two tokens
    that counts for nothing) keeps the number of forwards equal over ranks.
    """

    ids: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    topk_ids: torch.Tensor | None = None
    """int64 [B, T, K]: where outputs["topk_logprobs"] are asked for."""
    dummy: bool = False

    @property
    def response_mask(self) -> torch.Tensor:
        """bool [B, T]."""
        width = int(self.response_lengths.max()) if len(self.response_lengths) else 0
        return torch.arange(width, device=self.ids.device)[None] < self.response_lengths[:, None]


LossFunction = Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor]
"""(number of the micro-batch, outputs with gradients) -> this micro-batch's share of the loss, a scalar."""


class TrainingBackend(ABC):
    """A model (policy, value or score) on the ranks of a group, with its optimizer if it is trained.

    Every rank makes the same calls with the same number of micro-batches. Outputs, aligned to response tokens:
    `logprobs`, `entropy` [B, T] of softmax(logits / temperature), `values` [B, T] (of the state before token t), `scores`
    [B] (at the last token), `topk_logprobs` [B, T, K]; `topk:K` gives `topk_ids` and `topk_logprobs` of the K largest.
    """

    def __init__(self, model: ModelSpec, config: Any, optimizer: OptimizerConfig | None, context: Any):
        """`config`: this backend's own Config; `optimizer`: None for a frozen model; `context`: worker.RankContext."""
        self.model_spec, self.config, self.optimizer_config, self.context = model, config, optimizer, context
        self.version = 0
        """Optimizer steps taken: the version of the weights."""

    @classmethod
    def problems(cls, config: Any, layout: Any, kind: str) -> list[str]:
        """What cannot work for this config, ParallelLayout and kind of model; said before anything starts."""
        return []

    @abstractmethod
    def build(self) -> None:
        """Make the model with its weights, sharded, and the optimizer. A collective call."""

    @abstractmethod
    def forward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float = 1.0
    ) -> list[dict[str, torch.Tensor]]:
        """Outputs per micro-batch, without gradients, float32, on every tp rank (on the last stage only under pp)."""

    @abstractmethod
    def forward_backward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], loss: LossFunction, temperature: float = 1.0
    ) -> None:
        """Add the gradients of the sum of the losses over micro-batches and dp ranks to those already there."""

    @abstractmethod
    def optim_step(self) -> Metrics:
        """Clip, step, clear the gradients, add one to `version`. Metrics: grad_norm (before clipping), lr."""

    @abstractmethod
    def layout(self) -> WeightLayout:
        """Which boxes of each canonical parameter each rank holds."""

    @abstractmethod
    def named_shards(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """What this rank holds: canonical name, box, and a view of the storage."""

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole canonical parameters, one after the other, on every rank. A collective call."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Sharded weights, optimizer and counters. A collective call; the folder is new."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """What `save` wrote, bit for bit."""

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """config.json and model.safetensors under canonical names; written by rank 0. A collective call."""

    def offload(self) -> None:  # noqa: B027
        """Move weights and optimizer off the device while others use it."""

    def onload(self) -> None:  # noqa: B027
        """Undo `offload`."""
