"""The contract of training backends.

A backend runs a model forward and backward, steps its optimizer, saves and loads it, and states the
layout of its weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
import torch

from hybridflow.core.contracts.capabilities import TrainingCapabilities
from hybridflow.core.contracts.footprint import CollectiveCost, Execution, Footprint, Phase
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import ConfigError, HybridFlowError
from hybridflow.core.validators import non_negative, setting
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


def _rates(instance: Any, attribute: attrs.Attribute[Any], value: tuple[float, float]) -> None:
    if not all(0 <= rate < 1 for rate in value):
        raise ValueError(f"must be two numbers of at least 0 and below 1, got {value}")


@attrs.frozen
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) with warm-up, decay and gradient clipping."""

    # Updates
    lr: float = attrs.field(default=1e-6, validator=_positive)
    """Peak learning rate."""
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=_rates)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = setting(1e-8, non_negative)
    """Term added to the denominator of the update, for numerical stability."""
    weight_decay: float = setting(0.0, non_negative)
    """Decoupled weight decay; 0 is off."""
    max_grad_norm: float = setting(1.0, non_negative)
    """Gradients are scaled down to this global L2 norm; 0 is off."""
    # Schedule of the learning rate
    warmup_steps: int = setting(0, non_negative)
    """Optimizer steps over which the learning rate rises linearly: it is lr/warmup_steps in the
    first of them and lr in the last."""
    schedule: str = attrs.field(
        default="constant", validator=attrs.validators.in_(("constant", "linear", "cosine"))
    )
    """Learning rate after the warm-up; linear and cosine end at min_lr_ratio * lr after
    total_steps."""
    total_steps: int = setting(0, non_negative)
    """Optimizer steps over which linear and cosine run. 0: those of run.steps, so that more of
    these at --resume stretch the schedule."""
    min_lr_ratio: float = attrs.field(default=0.0, validator=_fraction)
    """Final learning rate of linear and cosine, as a fraction of lr."""

    def __attrs_post_init__(self) -> None:
        # Without its own length a schedule gets the run's (`over`).
        if self.schedule == "constant" or not self.total_steps:
            return
        if self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule!r} needs total_steps > warmup_steps, "
                f"got {self.total_steps} and {self.warmup_steps}"
            )

    def over(self, steps: int | None) -> OptimizerConfig:
        """Return the same settings with a schedule of the run's `steps`, unless it has a length.

        Raises ValueError where neither is known, or the warm-up is as long as the schedule.
        """
        if self.schedule == "constant" or self.total_steps:
            return self
        if steps is None:
            raise ValueError(
                f"schedule {self.schedule!r} needs total_steps: set it, for the algorithm does not "
                "say how many optimizer steps a step has (updates_per_step)"
            )
        return attrs.evolve(self, total_steps=steps)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (from 0).

        With progress p, from 0 at the end of the warm-up to 1 at total_steps, the rate after the
        warm-up is lr * (m + (1 - m) * d): m = min_lr_ratio, d = 1 - p for linear and
        (1 + cos(pi * p)) / 2 for cosine.
        """
        # The rate of step 0 is not 0, but the first of warmup_steps equal increases.
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr

        # Steps after total_steps stay at the end of the schedule.
        decay_steps = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / decay_steps, 1.0)
        decay = 1 - progress
        if self.schedule == "cosine":
            decay = 0.5 * (1 + math.cos(progress * math.pi))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * decay)


class Packing(Enum):
    """How the rows of a micro-batch are packed; the values are texts for users."""

    PADDED = "padded"
    """Each row has the length of the longest."""
    PACKED = "packed"
    """Rows are concatenated, without padding."""
    SHARED = "packed, prompts shared"
    """Packed, and rows with equal prompts share one copy of it."""


@attrs.frozen(eq=False)
class MicroBatch:
    """The B rows of one forward pass, padded to S tokens each, or packed into N tokens.

    Response token t of row i is at position prompt_lengths[i] + t of its row (every prompt has a
    token); T is the length of the longest response.

        padded    ids[i]  p p p p r r r 0 0             p: prompt, r: response, 0: padding
        packed    ids[0]  p p r p p p r p p r r r       prompt_at 0 7 3, response_at 2 9 6
        shared    ids[0]  p p p r p p r r r r r         prompt_at 0 4 4, response_at 3 6 8

    Only backends that support packed rows get them (`TrainingBackend.packing`): no token may attend
    to another row's. A dummy (one row of two tokens, whose loss is multiplied by 0) keeps the
    number of forward passes equal over ranks.
    """

    ids: torch.Tensor
    """Tokens, int64, on the device: prompt then response. [B, S] with 0 on the right, or [1, N]."""
    prompt_lengths: torch.Tensor
    """Lengths of the prompts, int64 [B]. They are on the CPU, as response_lengths are, so that
    shapes and indices made of them cost no synchronisation with the device."""
    response_lengths: torch.Tensor
    """Lengths of the responses, int64 [B], on the CPU."""
    topk_ids: torch.Tensor | None = None
    """The token ids of outputs["topk_logprobs"], int64 [B, T, K], on the device."""
    dummy: bool = False
    extras: Mapping[str, Column] = attrs.field(factory=dict)
    """The columns that the backend declares (TrainingCapabilities.extras), unchanged; none for a
    dummy."""
    prompt_at: torch.Tensor | None = None
    """For packed rows: the index in ids of each row's first token, int64 [B], on the CPU. Rows with
    equal prompts may share one. None: rows are padded."""
    response_at: torch.Tensor | None = None
    """For packed rows: the index in ids of each row's first response token, int64 [B], on the CPU:
    after the prompt, unless several rows share the prompt."""

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return len(self.prompt_lengths)

    @property
    def width(self) -> int:
        """T, the length of the longest response."""
        return int(self.response_lengths.max()) if self.rows else 0

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens of each row, int64 [B], on the CPU."""
        return self.prompt_lengths + self.response_lengths

    @property
    def packed(self) -> bool:
        """Whether the rows are packed."""
        return self.prompt_at is not None

    @cached_property
    def response_starts(self) -> torch.Tensor:
        """The flat index in ids of each row's first response token, packed or padded."""
        if self.response_at is not None:
            return self.response_at
        return torch.arange(self.rows) * self.ids.shape[1] + self.prompt_lengths

    @cached_property
    def shared(self) -> torch.Tensor:
        """Whether each row shares its prompt with others, bool [B], on the CPU."""
        if self.prompt_at is None:
            return torch.zeros(self.rows, dtype=torch.bool)
        # How many rows begin at each index
        counts = torch.bincount(self.prompt_at)
        return counts[self.prompt_at] > 1

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The (row, t) of the N response tokens, row by row: two int64 [N] on the CPU."""
        return counted(self.response_lengths)


def counted(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, t) of each token of rows with these lengths: two int64 [sum of lengths].

    t counts from the row's first token.
    """
    rows = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return rows, torch.arange(len(rows)) - starts[rows]


OUTPUTS = {
    "policy": ("logprobs", "entropy", "topk_logprobs"),
    "value": ("values",),
    "score": ("scores",),
}
"""Kind of model -> its outputs; a policy also has topk:K for any K."""


def check_needs(kind: str, needs: Sequence[str]) -> None:
    """Raise HybridFlowError for an output that a model of this kind does not have."""
    for need in needs:
        if need not in OUTPUTS[kind] and not (kind == "policy" and need.startswith("topk:")):
            outputs = ", ".join(OUTPUTS[kind]) + (", topk:K" if kind == "policy" else "")
            raise HybridFlowError(f"a {kind} model has no output {need!r}; it has {outputs}")


PARTS = ("weights", "optimizer")
"""The parts of a model that a backend can offload separately."""

LossFunction = Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor]
"""(index of the micro-batch, outputs with gradients) -> its share of the loss, a scalar."""


class TrainingSettings:
    """Base of a training backend's `Config`: figures of a model that are known before it is built.

    It must not need the backend's library. The defaults describe data parallelism alone: every rank
    holds the whole model in float32.
    """

    switches: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Settings that trade memory for time -> the values that a planner tries, the one with the
    least memory last."""

    @classmethod
    def defaults_on(cls, device: str, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the defaults that depend on `device` ("cpu", "cuda"), by setting.

        hf_config: the fields of the model's config. Other defaults are those of the fields.
        """
        return {}

    @property
    def varies(self) -> str:
        """Why two runs on GPUs may differ in bits though torch's algorithms are deterministic.

        "" where they do not (run.deterministic).
        """
        return "it does not say that its bits repeat (TrainingSettings.varies)"

    def model_shape(self, hf_config: Mapping[str, Any]) -> ModelShape:
        """Return a model's shape by the fields of its config.

        Raises ConfigError for an unknown architecture.
        """
        raise ConfigError(
            "the backend does not say the shapes of its models (TrainingSettings.model_shape)"
        )

    def example_config(
        self, hidden: int, layers: int, vocab: int, heads: int, kv_heads: int
    ) -> dict[str, Any]:
        """Return the config fields of a small model, for measurements (`hybridflow calibrate`).

        Raises ConfigError where the backend has none.
        """
        raise ConfigError(
            "the backend names no model to measure with (TrainingSettings.example_config)"
        )

    def execution(self, trained: bool) -> Execution:
        """Return how the passes of a trained, or of a frozen, model are computed."""
        return Execution()

    def packing(self, hf_config: Mapping[str, Any]) -> tuple[Packing, str]:
        """Return how rows are packed for a model with these config fields, and why not denser."""
        return Packing.PADDED, "the backend takes padded rows"

    def takes(self, shape: ModelShape, layout: ParallelLayout) -> bool:
        """Return whether the backend supports this layout for a model of this shape."""
        return layout.world == layout.dp

    def footprint(
        self, size: ModelSize, layout: ParallelLayout, trained: bool, micro_batches: int
    ) -> Footprint:
        """Return the memory that a rank needs and the bytes that it moves.

        `micro_batches` is the number per update (or pass) and dp rank.
        """
        weights = 4.0 * size.params  # float32
        if not trained:
            return Footprint(resident=weights)

        # AdamW has two moments per trained weight. Its step reads weight, gradient and both
        # moments, and writes weight and moments: seven accesses.
        trained_weights = weights * size.trained_share
        return Footprint(
            resident=weights + 2 * trained_weights,
            training=(Phase(trained_weights, "forward"), Phase(trained_weights, "backward")),
            update=(
                CollectiveCost("all_reduce", trained_weights, layout.dp, layout.tp * layout.pp),
            ),
            step_traffic=7 * trained_weights,
        )

    def planned_layout(
        self, shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype
    ) -> WeightLayout:
        """Return the boxes that each rank will hold.

        Raises ConfigError for an impossible layout.
        """
        # Data parallelism: whole parameters, everywhere.
        params = shape.params(dtype)
        boxes = {name: (Box.full(param.shape),) for name, param in params.items()}
        return WeightLayout(params, dict.fromkeys(range(layout.world), boxes), shape.ties)


def training_settings(config: Any) -> TrainingSettings:
    """Return a backend's config if it derives from TrainingSettings, else the defaults."""
    return config if isinstance(config, TrainingSettings) else TrainingSettings()


class Writing(Protocol):
    """A rank's part of a checkpoint that is being written beside the training."""

    def done(self, wait: bool) -> bool:
        """Return whether all is on the disk; with `wait` when it is.

        Raises CheckpointError where it could not be written.
        """


class TrainingBackend(ABC):
    """A model (policy, value or score) on the ranks of a group, and its optimizer if it is trained.

    Every rank makes the same calls with the same number of micro-batches. Outputs are aligned to
    response tokens, and `needs` names those that a pass computes:

        logprobs       [B, T]     of softmax(logits / temperature), at the response's tokens
        entropy        [B, T]     of the same distribution
        values         [B, T]     of the state before token t
        scores         [B]        at the last token
        topk_logprobs  [B, T, K]  at MicroBatch.topk_ids
        topk:K                    gives topk_ids and topk_logprobs of the K largest
    """

    Config: ClassVar[type | None] = None
    """Its settings: a frozen attrs class derived from TrainingSettings."""
    capabilities: ClassVar[TrainingCapabilities] = TrainingCapabilities()
    """Capabilities of a plugin that is registered in one line; a Descriptor has its own."""

    def __init__(
        self, model: ModelSpec, config: Any, optimizer: OptimizerConfig | None, context: RankContext
    ):
        """`config`: an instance of this backend's Config; `optimizer`: None for a frozen model."""
        self.model_spec = model
        self.config = config
        self.optimizer_config = optimizer
        self.context = context
        self.version = 0
        """Number of optimizer steps taken: the version of the weights."""
        self.packing = Packing.PADDED
        """The packing of the micro-batches that it gets; `build` may set it to the result of
        `TrainingSettings.packing`. A backend that takes packed rows must take padded ones too."""

    # --- building the model ---

    @classmethod
    def problems(cls, config: Any, layout: ParallelLayout, model: ModelSpec) -> list[str]:
        """Return why this config, layout and model cannot work together; called before a run."""
        return []

    @abstractmethod
    def build(self) -> None:
        """Make the model with its weights, sharded, and the optimizer. A collective call."""

    # --- passes and updates ---

    @abstractmethod
    def forward(
        self, micros: Sequence[MicroBatch], needs: Sequence[str], temperature: float = 1.0
    ) -> list[dict[str, torch.Tensor]]:
        """Return the outputs of each micro-batch: float32, without gradients.

        Every tp rank has them; under pipeline parallelism only those of the last pipeline stage.
        """

    @abstractmethod
    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        needs: Sequence[str],
        loss: LossFunction,
        temperature: float = 1.0,
    ) -> None:
        """Accumulate gradients of the losses' sum over micro-batches and dp ranks.

        The result of `loss` has a graph, also for dummies and where all weights are 0, since the
        backward passes of all ranks must run their collectives together.
        """

    @abstractmethod
    def optim_step(self) -> Metrics:
        """Clip, step, clear the gradients, and add one to `version`.

        The metrics are grad_norm (before clipping) and lr. When the norm is not finite (all ranks
        see the same norm) only the gradients are cleared, and the caller raises.
        """

    # --- access to the weights ---

    @abstractmethod
    def layout(self) -> WeightLayout:
        """Return which boxes of each canonical parameter each rank holds."""

    @abstractmethod
    def named_shards(self) -> Iterator[tuple[str, Box, Shard]]:
        """Yield this rank's shards: canonical name, box, and a view of the storage.

        Every rank calls it, and reads to its end. The shard is a LazyShard where an engine gets
        values other than the stored ones (merged adapters, say).
        """

    def adopt(self, name: str, storage: torch.Tensor) -> bool:
        """Keep a whole parameter, with its present values, in `storage` (an engine's) from now on.

        Returns False, with nothing changed, where that is impossible: the dtype, shape or device
        differ, or this rank holds a shard only.
        """
        return False

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole canonical parameters, one after the other, on every rank.

        A collective call, to be read to its end. A tensor may be the storage itself (on one rank,
        say) and is valid until the next one is yielded: copy it to keep it.
        """

    # --- files ---

    @abstractmethod
    def save(self, folder: Path) -> Writing | None:
        """Write sharded weights, optimizer and counters into an empty folder. A collective call.

        It may return before all is on the disk, with what tells when it is: from then on the state
        may change.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the files of `save`, bit for bit, on any number of ranks.

        Raises CheckpointError when it cannot be read.
        """

    @abstractmethod
    def export_hf(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors with canonical names into a folder, on rank 0.

        dtype: of the written weights; None: that in which the backend computes. A collective call.
        """

    # --- memory ---

    def offload(self, parts: Sequence[str] = PARTS) -> None:  # noqa: B027
        """Move these of PARTS to the host's memory; parts that are there already stay."""

    def onload(self, parts: Sequence[str] = PARTS) -> None:  # noqa: B027
        """Move these of PARTS back to the device; parts that are there already stay."""
