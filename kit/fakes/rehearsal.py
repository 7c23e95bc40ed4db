"""Runs a training backend through its phases on a simulated GPU and ranks, and records its memory.

    build -> update of 1 micro-batch -> of several -> a forward beside others -> an update beside
    others -> sync -> save and load

The backend's own code runs; only values are missing. What it allocates, and what crosses between
host and device, is counted.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

from hybridflow.core.contracts.training import (
    OUTPUTS,
    PARTS,
    MicroBatch,
    OptimizerConfig,
    TrainingBackend,
)
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit import checkpoint
from hybridflow.kit.fakes.device import FakeGPU, fake_device
from hybridflow.kit.fakes.ranks import FakeRank, fake_ranks


@attrs.frozen
class PhaseMemory:
    """The device memory of one phase. All figures but the last are bytes."""

    before: int
    """In use when it began."""
    peak: int
    """The most in use at a time."""
    after: int
    """In use when it had ended."""
    largest: int
    """The largest single storage in use."""
    arrived: int
    """Copied from the host."""
    left: int
    """Copied to the host."""
    waits: int = 0
    """How often the host waited for values of the device; no bytes."""


@attrs.frozen
class Rehearsal:
    """The recorded phases of a backend on one rank."""

    parameters: int
    """The number of parameters of the whole model."""
    held: int
    """The number of parameters of this rank's shards."""
    phases: dict[str, PhaseMemory]
    """Phase by its name, in the order in which they ran."""
    devices: frozenset[str]
    """Types of the devices on which weights and buffers are."""


@attrs.frozen
class MicroBatches:
    """The micro-batches of a rehearsal: `count` of `rows` rows with `tokens` tokens each."""

    rows: int = 2
    tokens: int = 32
    """The length of a row."""
    count: int = 1
    response: int | None = None
    """How many tokens of a row are the response's; None: half of them."""
    group: int = 1
    """Rows with one prompt, which they share; it divides `rows`."""

    def micros(self, device: torch.device) -> list[MicroBatch]:
        """Return the micro-batches, on the device."""
        # Half of the tokens are the response's, unless `response` is given.
        response = self.tokens // 2 if self.response is None else self.response
        prompts = torch.full((self.rows,), self.tokens - response)
        responses = torch.full((self.rows,), response)
        if self.group == 1:
            ids = torch.zeros(self.rows, self.tokens, dtype=torch.int64).to(device)
            return [MicroBatch(ids, prompts, responses) for _ in range(self.count)]

        # First the prompts, then the responses to them.
        prompt = self.tokens - response
        first = self.rows // self.group * prompt
        prompt_at = torch.arange(self.rows) // self.group * prompt
        response_at = first + torch.arange(self.rows) * response
        ids = torch.zeros(1, first + self.rows * response, dtype=torch.int64).to(device)
        shared = MicroBatch(ids, prompts, responses, prompt_at=prompt_at, response_at=response_at)
        return [shared for _ in range(self.count)]


@contextlib.contextmanager
def rehearsed(
    backend_class: type[TrainingBackend],
    spec: ModelSpec,
    config: Any,
    optimizer: OptimizerConfig | None,
    layout: ParallelLayout,
    rank: int = 0,
) -> Iterator[Rehearser]:
    """Yield a backend that is built on the fake device, as one of the layout's ranks."""
    # The device counts memory, collectives return at once, and rows are not packed.
    fakes = FakeGPU(), fake_ranks(layout, fake_device(), rank), unpacked()
    with fakes[0] as gpu, fakes[1] as context, fakes[2]:
        backend = backend_class(spec, config, optimizer, context)
        rehearser = Rehearser(backend, gpu)
        with rehearser.phase("build"):
            backend.build()
        try:
            yield rehearser
        finally:
            # Memory of this model must not count in the next rehearsal.
            del rehearser.backend, backend


class Rehearser:
    """Runs phases of one backend and records them."""

    def __init__(self, backend: TrainingBackend, gpu: FakeGPU):
        self.backend = backend
        self.gpu = gpu
        self.memory = gpu.memory
        self.phases: dict[str, PhaseMemory] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what happens inside the block."""
        # Peaks and copies are those of this phase alone.
        self.memory.restart()
        before = self.memory.now
        waits = self.gpu.waits.total()
        yield
        self.phases[name] = PhaseMemory(
            before=before,
            peak=self.memory.peak,
            after=self.memory.now,
            largest=self.memory.largest,
            arrived=self.memory.arrived,
            left=self.memory.left,
            waits=self.gpu.waits.total() - waits,
        )

    @property
    def context(self) -> FakeRank:
        """The context of the rank."""
        context = self.backend.context
        assert isinstance(context, FakeRank)
        return context

    # --- what a role does ---

    def update(self, name: str, rows: MicroBatches, step: bool = True) -> None:
        """Take an optimizer step over micro-batches."""
        # One output is enough to run every layer.
        needs = [OUTPUTS[self.backend.model_spec.kind][0]]
        micros = rows.micros(self.context.device)
        with self.phase(name):
            self.backend.forward_backward(micros, needs, _sum)
        if step:
            with self.phase(f"{name}: step"):
                self.backend.optim_step()

    def forward(self, name: str, rows: MicroBatches) -> None:
        """Compute outputs without gradients."""
        needs = [OUTPUTS[self.backend.model_spec.kind][0]]
        # As logprobs are asked for.
        micros = rows.micros(self.context.device)
        with self.phase(name):
            self.backend.forward(micros, needs)

    def offload(self, name: str, parts: Sequence[str] = PARTS) -> None:
        """Move parts away."""
        with self.phase(name):
            self.backend.offload(parts)

    def onload(self, name: str, parts: Sequence[str] = PARTS) -> None:
        """Move parts back."""
        with self.phase(name):
            self.backend.onload(parts)

    def sync(self, name: str) -> None:
        """Read every box that this rank holds, as a sync to engines does."""
        with self.phase(name):
            # Empty boxes are nothing to read.
            reader = ShardReader(self.backend.named_shards())
            layout = self.backend.layout()
            for parameter, boxes in layout.held[self.context.rank].items():
                for box in boxes:
                    if box.numel:
                        reader.read(parameter, box)

    def save_and_load(self, name: str) -> None:
        """Write this rank's part of a checkpoint, and read it again."""
        # Real files, of zeros.
        with tempfile.TemporaryDirectory() as folder, _alone():
            with self.phase(f"{name}: save"):
                writing = self.backend.save(Path(folder))
            if writing is not None:
                writing.done(wait=True)
            with self.phase(f"{name}: load"):
                self.backend.load(Path(folder))

    def result(self) -> Rehearsal:
        """Return what was recorded."""
        # Boxes count elements, whatever the dtype.
        layout = self.backend.layout()
        held = layout.held[self.context.rank]
        shards = [shard for _, _, shard in self.backend.named_shards()]
        devices = {shard.device.type for shard in shards if isinstance(shard, torch.Tensor)}
        return Rehearsal(
            parameters=sum(param.numel for param in layout.params.values()),
            held=sum(box.numel for boxes in held.values() for box in boxes),
            phases=self.phases,
            devices=frozenset(devices),
        )


def _sum(index: int, outputs: Any) -> torch.Tensor:
    """Return a loss that needs every output."""
    return sum(values.float().sum() for values in outputs.values())


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Make checkpoints treat this rank as the only one: the others are simulated."""
    with (
        mock.patch.object(checkpoint, "_gathered", lambda own: [own]),
        mock.patch.object(checkpoint, "_check_complete"),
    ):
        yield


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Make transformers find one sequence in each row.

    It reads this from position values, which are missing here, and would build masks that rows of
    one sequence do not need.
    """
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *args, **options: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
