"""What the ranks of a test run. Each function is called as function(rank, world, *args) on every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from helpers.training_reference import make_batch, spec_of
from hybridflow.core.contracts.loss import Loss
from hybridflow.core.contracts.training import PARTS, OptimizerConfig
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.job.job import ModelRole
from hybridflow.core.plugins import registry
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.kit.huggingface import modeling
from hybridflow.kit.testing.passes import memoryless

OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.5, eps=1e-3)
"""Without so large an eps AdamW blows rounding errors of gradients near 0 up to lr."""


GROUPS: dict[tuple, dict] = {}
"""Process groups that the workers of a process share: each one has threads, and there are many workers in turn."""


@attrs.frozen
class Setup:
    """A role and how it is spread."""

    path: str
    kind: str = "policy"
    layout: ParallelLayout = attrs.field(factory=ParallelLayout)
    backend: str = "fsdp"
    config: Any = None
    """The backend's own; None: its defaults."""
    optimizer: OptimizerConfig | None = OPTIMIZER
    micro_batch_tokens: int = 64
    temperature: float = 1.0
    engine: str | None = None
    offload: bool = False
    model: ModelSpec | None = None
    logits_at_once: int = modeling.LOGITS_AT_ONCE
    generation_tp: int = 1
    generation_pp: int = 1
    sync: dict[str, Any] = attrs.field(factory=dict)
    """The fields sync and transport of the ModelRole (helpers/syncs.py)."""
    engine_config: dict[str, Any] = attrs.field(factory=dict)
    keep_engine: bool = True


def said_by(attempt: Callable[[], Any]) -> str:
    """The message of its failure; "" when it does not fail."""
    try:
        attempt()
    except Exception as error:
        return str(error)
    return ""


def make_worker(rank: int, setup: Setup) -> ModelWorker:
    modeling.LOGITS_AT_ONCE = setup.logits_at_once
    sizes = (setup.generation_pp, setup.generation_tp)
    groups = GROUPS.setdefault((setup.layout, sizes, rank), {})
    generation = generation_layout(setup.layout, *sizes)
    context = RankContext(
        "actor", rank, setup.layout, torch.device("cpu"), generation=generation, groups=groups
    )
    config = setup.config or registry().config_class("training_backend", setup.backend)()
    engine_config = None
    if setup.engine:
        engine_config = registry().config_class("rollout_engine", setup.engine)(
            **setup.engine_config
        )
    role = ModelRole(
        setup.model or spec_of(setup.path, setup.kind), setup.backend, config, setup.micro_batch_tokens, setup.optimizer,
        setup.engine, engine_config, setup.temperature,
        setup.offload, keep_engine=setup.keep_engine, **setup.sync,
    )  # fmt: skip
    worker = ModelWorker(context, role)
    worker.build()
    return worker


def mine(worker: ModelWorker, batch: Batch, unit: str = "row") -> Batch:
    """This rank's rows, cut as the controller cuts them."""
    if unit != "row":
        batch = batch.whole(np.asarray(batch[unit].values))
    return batch.split(worker.context.layout.dp)[worker.context.coords.dp]


def parameters(worker: ModelWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.backend.full_parameters()}


def gradients(rank: int, setup: Setup, pairs: list[tuple[Batch, Loss]]) -> dict[str, torch.Tensor]:
    """Whole gradients, read off the move of the weights in one step without memory: any backend gives them so."""
    worker = make_worker(rank, attrs.evolve(setup, optimizer=memoryless(1e5)))
    before = parameters(worker)
    worker.update(pairs)
    config = worker.backend.optimizer_config
    found = {}
    for name, after in parameters(worker).items():
        moved = before[name].double() - after.double()
        found[name] = (moved * config.eps / (config.lr - moved.abs())).float()
    return found


def train(
    rank: int, world: int, setup: Setup, pairs: list[tuple[Batch, Loss]], steps: int = 1
) -> dict[str, Any]:
    """The metrics without an update, the gradients of the first step, metrics of all, and the parameters at the end."""
    worker = make_worker(rank, setup)
    local_pairs = [(mine(worker, batch, loss.unit), loss) for batch, loss in pairs]
    evaluated = worker.loss(local_pairs[0])
    grads = gradients(rank, setup, local_pairs)
    found = [worker.update(local_pairs) for _ in range(steps)]
    found_at_end = {"parameters": parameters(worker), "version": worker.backend.version}
    return {"evaluated": evaluated, "grads": grads, "metrics": found, **found_at_end}


def evaluate(rank: int, world: int, setup: Setup, batch: Batch, loss: Loss) -> Metrics:
    worker = make_worker(rank, setup)
    return worker.loss((mine(worker, batch, loss.unit), loss))


def outputs(rank: int, world: int, setup: Setup, batch: Batch) -> dict[str, Any]:
    """Columns of this rank's rows."""
    worker = make_worker(rank, setup)
    rows = mine(worker, batch)
    if setup.kind == "policy":
        made = worker.logprobs(rows, {"logprobs": "logprobs", "entropy": "entropy"}, 3)
    elif setup.kind == "value":
        made = worker.values(rows, "values")
    else:
        made = worker.score(rows, "scores")
    return {name: made[name] for name in made}


def holdings(rank: int, world: int, setup: Setup) -> dict[str, Any]:
    """The layout, this rank's shards, and the whole parameters."""
    worker = make_worker(rank, setup)
    shards = [(name, box, tensor.clone()) for name, box, tensor in worker.backend.named_shards()]
    return {"layout": worker.backend.layout(), "shards": shards, "whole": parameters(worker)}


def save_after(
    rank: int, world: int, setup: Setup, pairs: list, steps: int, folder: str, more: int
) -> dict[str, Any]:
    """Train, save, train on: the parameters at both points."""
    worker = make_worker(rank, setup)
    pairs = [(mine(worker, batch, loss.unit), loss) for batch, loss in pairs]
    for _ in range(steps):
        worker.update(pairs)
    worker.save(folder)
    saved = parameters(worker)
    for _ in range(more):
        worker.update(pairs)
    assert worker.saved(wait=True)
    return {"saved": saved, "end": parameters(worker)}


def load_and_train(
    rank: int, world: int, setup: Setup, pairs: list, folder: str, more: int
) -> dict[str, Any]:
    worker = make_worker(rank, setup)
    pairs = [(mine(worker, batch, loss.unit), loss) for batch, loss in pairs]
    if setup.optimizer is not None and more:
        worker.update(pairs)  # what was there before must not matter
    worker.load(folder)
    loaded = parameters(worker)
    moments = {
        f"{part.entry} {part.box}": part.values.abs().sum().item()
        for part in worker.backend._state()
        if part.entry.startswith("optimizer.")
    }
    for _ in range(more):
        worker.update(pairs)
    return {
        "loaded": loaded,
        "end": parameters(worker),
        "moments": moments,
        "version": worker.backend.version,
    }


def export(
    rank: int, world: int, setup: Setup, pairs: list, folder: str
) -> dict[str, torch.Tensor]:
    worker = make_worker(rank, setup)
    if pairs:
        worker.update([(mine(worker, batch, loss.unit), loss) for batch, loss in pairs])
    worker.export(folder)
    return parameters(worker)


def moved(rank: int, world: int, setup: Setup, pairs: list, steps: int) -> dict[str, torch.Tensor]:
    """Training whose memory is given back before and after each step, as offload does on a GPU."""
    worker = make_worker(rank, setup)
    pairs = [(mine(worker, batch, loss.unit), loss) for batch, loss in pairs]
    batch = pairs[0][0]
    for _ in range(steps):
        away_and_back(worker)
        worker.logprobs(batch, {"logprobs": "logprobs"})
        away_and_back(worker)
        worker.update(pairs)
    return parameters(worker)


def away_and_back(worker: ModelWorker) -> None:
    """Empty every storage of weights and optimizer, and fill it again: a CPU's backend itself moves nothing."""
    residence = worker.backend.residence
    residence.offload(PARTS)
    sources = [residence._tensors[part] for part in PARTS] + list(residence._scratch.values())
    stored = [tensor for source in sources for tensor in source()]
    assert stored and not any(t.untyped_storage().nbytes() for t in stored)
    residence.onload(PARTS)


def staying(rank: int, world: int, setup: Setup, pairs: list) -> list[str]:
    """Return what tensors of 8 kB and more stay when all parts have left, without the copies on the host.

    It looks at every tensor that Python knows, so also at those that the backend does not name.
    """
    earlier = _storages()
    worker = make_worker(rank, setup)
    if setup.optimizer is not None:
        worker.update([(mine(worker, batch, loss.unit), loss) for batch, loss in pairs])
    residence = worker.backend.residence
    residence.offload(PARTS)
    copies = {
        away.on_host.untyped_storage().data_ptr()
        for of in residence._storages.values()
        for away in of.values()
        if away.on_host is not None
    }
    left = _storages()
    return [text for at, text in left.items() if at not in copies and at not in earlier]


def _storages() -> dict[int, str]:
    """Return address -> what it is, for each storage of 8 kB and more.

    Fake tensors, which earlier tests of the process may have left with torch.compile, have none.
    """
    gc.collect()
    tensors = (
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor) and not issubclass(type(one), FakeTensor)
    )
    return {
        one.untyped_storage().data_ptr(): f"{type(one).__name__} {one.dtype} {list(one.shape)}"
        for one in tensors
        if one.device.type == "cpu" and one.untyped_storage().nbytes() >= 8192
    }


def reload(rank: int, world: int, setup: Setup, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs before and after the weights are replaced by those of a checkpoint."""
    worker = make_worker(rank, setup)
    batch = mine(worker, make_batch(8))
    before = worker.logprobs(batch, {"logprobs": "x"})["x"].values
    worker.load(folder)
    return before, worker.logprobs(batch, {"logprobs": "x"})["x"].values


def failing_load(rank: int, world: int, setup: Setup, folder: str) -> str:
    worker = make_worker(rank, setup)
    try:
        worker.load(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def failing_build(rank: int, world: int, setup: Setup) -> str:
    try:
        make_worker(rank, setup)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def failing_update(
    rank: int, world: int, setup: Setup, batch: Batch, loss: Loss
) -> tuple[str, bool]:
    """The error, and whether the weights are as they were."""
    worker = make_worker(rank, setup)
    before = parameters(worker)
    try:
        worker.update([(mine(worker, batch, loss.unit), loss)])
        text = "updated"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    after = parameters(worker)
    return text, all(torch.equal(before[n], after[n]) for n in before)


def disagreeing_update(
    rank: int, world: int, setup: Setup, batch: Batch, loss: Loss
) -> tuple[str, bool, bool]:
    """The error of an update whose engine said something else; whether the weights are as they were, and whether the
    next update, without a limit, ends as if there had been none before."""
    worker, other = (make_worker(rank, setup) for _ in range(2))
    rows = mine(worker, batch, loss.unit)
    before = parameters(worker)
    worker.role, unlimited = attrs.evolve(worker.role, mismatch_stop=1e-3), worker.role
    try:
        worker.update([(rows, loss)])
        text = "updated"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    unchanged = all(torch.equal(before[n], now) for n, now in parameters(worker).items())
    worker.role = unlimited
    for each in (worker, other):
        each.update([(rows, loss)])
    after, expected = parameters(worker), parameters(other)
    alike = all(torch.equal(after[n], expected[n]) for n in before)
    assert not torch.equal(after[next(iter(before))], before[next(iter(before))])
    return text, unchanged, alike


def step_without(rank: int, world: int, setup: Setup, pairs: list, patch: str) -> None:
    """A build and a step of Megatron without one of its patches for the CPU."""
    import functools

    from hybridflow.backends.megatron import backend

    backend.on_cpu = functools.partial(backend.on_cpu, without=[patch])
    worker = make_worker(rank, setup)
    worker.update([(mine(worker, batch, loss.unit), loss) for batch, loss in pairs])


def logit_shapes(rank: int, world: int, setup: Setup, batch: Batch, loss: Loss) -> set[int]:
    """The numbers of logits of one state that the head gives this rank in an update."""
    worker = make_worker(rank, setup)
    found = set()
    head = worker.backend.module.head
    head.register_forward_hook(lambda module, given, logits: found.add(logits.shape[-1]))
    worker.update([(mine(worker, batch, loss.unit), loss)])
    return found
