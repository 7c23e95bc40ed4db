"""The contract of training backends: forward, forward-backward, optimizer step, and who holds which weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from hybridflow.core.contracts.capabilities import TrainingCapabilities
from hybridflow.core.contracts.footprint import Collective, Execution, Footprint, Phase
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.values.columns import Column
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.model_shape import ModelShape, ModelSize
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box, Shard, WeightLayout


def _positive(instance: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if value <= 0:
        raise ValueError(f"must be greater than 0, got {value}")


def _fraction(instance: Any, attribute: attrs.Attribute[float], value: float) -> None:
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
    """Optimizer steps over which lr rises linearly: lr/warmup_steps in the first, lr in the last of them."""
    schedule: str = attrs.field(
        default="constant", validator=attrs.validators.in_(("constant", "linear", "cosine"))
    )
    """What follows the warm-up; linear and cosine end at min_lr_ratio * lr after total_steps."""
    total_steps: int = 0
    """Optimizer steps of the whole run, for linear and cosine."""
    min_lr_ratio: float = attrs.field(default=0.0, validator=_fraction)

    def __attrs_post_init__(self) -> None:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule!r} needs total_steps > warmup_steps, got {self.total_steps} and "
                f"{self.warmup_steps}"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        left = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(done * math.pi))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)


@attrs.frozen(eq=False)
class MicroBatch:
    """Rows for one forward. `ids` [B, S] int64: prompt then response, filled with 0 on the right.

    Position of response token t of row i is prompt_lengths[i] + t (every prompt has a token); T = longest response. A
    dummy (one row of two tokens that counts for nothing) keeps the number of forwards equal over ranks.
    """

    ids: torch.Tensor
    """On the device."""
    prompt_lengths: torch.Tensor
    """int64 [B], on the CPU, as response_lengths: shapes and indices made of them cost no synchronisation."""
    response_lengths: torch.Tensor
    topk_ids: torch.Tensor | None = None
    """int64 [B, T, K], on the device: where outputs["topk_logprobs"] are asked for."""
    dummy: bool = False
    extras: Mapping[str, Column] = attrs.field(factory=dict)
    """The rows' columns that the backend declares (TrainingCapabilities.extras), as they are; none of a dummy."""

    @property
    def width(self) -> int:
        """T."""
        return int(self.response_lengths.max()) if len(self.response_lengths) else 0

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, t), int64 [N] on the CPU, of the N response tokens, row by row."""
        lengths = self.response_lengths
        rows = torch.repeat_interleave(lengths)
        return rows, torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]


OUTPUTS = {
    "policy": ("logprobs", "entropy", "topk_logprobs"),
    "value": ("values",),
    "score": ("scores",),
}
"""What a model of each kind can be asked for, beside topk:K of a policy."""


def check_needs(kind: str, needs: Sequence[str]) -> None:
    """Raise HybridFlowError for an output that a model of this kind does not have."""
    for need in needs:
        if need not in OUTPUTS[kind] and not (kind == "policy" and need.startswith("topk:")):
            has = ", ".join(OUTPUTS[kind]) + (", topk:K" if kind == "policy" else "")
            raise HybridFlowError(f"a {kind} model has no output {need!r}; it has {has}")


LossFunction = Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor]
"""(number of the micro-batch, outputs with gradients) -> this micro-batch's share of the loss, a scalar."""


class TrainingSettings:
    """Base of a training backend's `Config`: what can be said of a model before it is built, and without the backend's library.

    As it stands: data parallelism alone, the whole model in float32 on every rank.
    """

    def model_shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """The shape of a model by the fields of its config. Raises ConfigError for an architecture that is not known."""
        raise ConfigError(
            "the backend does not say the shapes of its models (TrainingSettings.model_shape)"
        )

    def example_config(
        self, hidden: int, layers: int, vocab: int, heads: int, kv_heads: int
    ) -> dict[str, Any]:
        """The fields of a small model's config, for measurements (`hybridflow calibrate`). Raises ConfigError."""
        raise ConfigError(
            "the backend names no model to measure with (TrainingSettings.example_config)"
        )

    def execution(self, trained: bool) -> Execution:
        """How passes are computed."""
        return Execution()

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Whether a model of this shape can be laid out so."""
        return layout.world == layout.dp

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """What a rank holds and moves; `micro_batches` is how many an update (or a pass) has on a dp rank."""
        weights = 4.0 * size.params
        if not trained:
            return Footprint(resident=weights)
        learnt = weights * size.trained_share
        return Footprint(
            resident=weights + 2 * learnt,
            training=(Phase(learnt, "forward"), Phase(learnt, "backward")),
            update=(Collective("all_reduce", learnt, layout.dp, layout.tp * layout.pp),),
            step_traffic=7 * learnt,
        )

    def planned_layout(
        self, shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Which boxes each rank will hold. Raises ConfigError for a layout that cannot be."""
        held = {name: (Box.full(param.shape),) for name, param in shape.params(dtype).items()}
        return WeightLayout(
            shape.params(dtype), dict.fromkeys(range(layout.world), held), shape.ties
        )


def training_settings(config: Any) -> TrainingSettings:
    """A backend's config where it says what it needs, else what the base says."""
    return config if isinstance(config, TrainingSettings) else TrainingSettings()


class TrainingBackend(ABC):
    """A model (policy, value or score) on the ranks of a group, with its optimizer if it is trained.

    Every rank makes the same calls with the same number of micro-batches. Outputs, aligned to response tokens:
    `logprobs`, `entropy` [B, T] of softmax(logits / temperature), `values` [B, T] (of the state before token t),
    `scores` [B] (at the last token), `topk_logprobs` [B, T, K]; `topk:K` gives `topk_ids` and `topk_logprobs` of the K
    largest.
    """

    Config: ClassVar[type | None] = None
    """Its settings: a frozen attrs class derived from TrainingSettings."""
    capabilities: ClassVar[TrainingCapabilities] = TrainingCapabilities()
    """Of a plugin that is registered in one line; a Descriptor has its own."""

    def __init__(
        self, model: ModelSpec, config: Any, optimizer: OptimizerConfig | None, context: RankContext
    ):
        """`config`: this backend's own Config; `optimizer`: None for a frozen model."""
        self.model_spec, self.config, self.optimizer_config, self.context = (
            model,
            config,
            optimizer,
            context,
        )
        self.version = 0
        """Optimizer steps taken: the version of the weights."""

    @classmethod
    def problems(cls, config: Any, layout: ParallelLayout, kind: str) -> list[str]:
        """What cannot work for this config, layout and kind of model; said before anything starts."""
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
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        """Add the gradients of the sum of the losses over micro-batches and dp ranks to those already there.

        What `loss` returns has gradients, of dummies and where all weights are 0 too: the ranks' backwards must meet.
        """

    @abstractmethod
    def optim_step(self) -> Metrics:
        """Clip, step, clear the gradients, add one to `version`. Metrics: grad_norm (before clipping), lr.

        When the norm is not finite (which every rank sees alike) only the gradients are cleared: the caller raises.
        """

    @abstractmethod
    def layout(self) -> WeightLayout:
        """Which boxes of each canonical parameter each rank holds."""

    @abstractmethod
    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """What this rank holds: canonical name, box, and a view of the storage. Every rank calls it, and reads to its end.

        A LazyShard where what is held is not what an engine gets (adapters are merged).
        """

    def adopt(self, name: str, storage: torch.Tensor) -> bool:
        """Keep a whole parameter in `storage` (a rollout engine's) from now on, with the values that it has here.

        False, and nothing changed, where that cannot be: another dtype, shape or device, or shards.
        """
        return False

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole canonical parameters, one after the other, on every rank. A collective call, to be read to its end.

        A tensor may be the storage itself (on one rank, say), and is good until the next one: copy what you keep.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Sharded weights, optimizer and counters. A collective call; the folder is new."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """What `save` wrote, bit for bit, on any number of ranks. Raises CheckpointError when it cannot be read."""

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """config.json and model.safetensors under canonical names; written by rank 0. A collective call."""

    def offload(self) -> None:  # noqa: B027
        """Move weights and optimizer off the device while others use it."""

    def onload(self) -> None:  # noqa: B027
        """Undo `offload`."""
