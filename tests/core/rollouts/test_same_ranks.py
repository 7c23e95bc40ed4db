"""A trainer and an engine on one rank: what they share, what is copied, and what happens when it arrives wrong."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.hybrid_jobs import unequal
from helpers.syncs import hybrid_engine, sync
from helpers.training_jobs import said_by

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.transformers.config import TransformersEngineConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.job.job import ModelRole
from hybridflow.core.resharding.plan import ReshardError
from hybridflow.core.values.weights import Box, LazyShard, WeightLayout
from hybridflow.core.workers.model_worker import ModelWorker
from hybridflow.kit.testing import one_rank, reference
from hybridflow.kit.testing.engine_base import requests

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def context():
    with one_rank() as context:
        yield context


@pytest.fixture
def built(context):
    """A function (engine's dtype, settings of the sync) -> a worker with its HybridEngine, which has not synced."""

    def make(dtype: str = "float32", **settings) -> ModelWorker:
        engine = TransformersEngineConfig(dtype=dtype)
        role = ModelRole(
            reference().spec,
            "fsdp",
            FSDPConfig(),
            64,
            OptimizerConfig(),
            "transformers",
            engine,
            **sync(**settings),
        )
        worker = ModelWorker(context, role)
        worker.build()
        return worker

    return make


def change(worker: ModelWorker) -> None:
    """As an update does: other weights, of the next version."""
    with torch.no_grad():
        for parameter in worker.backend.parameters.values():
            parameter.add_(0.25)
    worker.backend.version += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alias", [True, False])
def test_every_sync_brings_the_trainers_weights(built, dtype, alias):
    worker = built(dtype, alias=alias, verify=True)
    for version in (0, 1):
        worker.hybrid.sync()
        assert worker.engine.version == version
        assert unequal(worker) == []
        change(worker)


def test_one_copy_is_kept_where_both_sides_may_have_it(built):
    """Embeddings and norms: the engine keeps them as the trainer does. Of two dtypes nothing can be one copy."""
    shared, apart, narrow = built(), built(alias=False), built("bfloat16")
    for worker in (shared, apart, narrow):
        worker.hybrid.sync()
    tensors = reference().parameters
    alike = sum(tensors[name].numel() * 4 for name in tensors if "norm" in name or "embed" in name)
    assert [w.hybrid.aliased_bytes for w in (shared, apart, narrow)] == [alike, 0, 0]
    mine, theirs = shared.backend.parameters[NORM], shared.engine.read(NORM, Box.full((32,)))
    assert mine.data_ptr() == theirs.data_ptr()


def test_values_that_are_made_by_being_read_are_made_once_in_a_transfer(built, monkeypatch):
    """Merged adapters, say; those of the shared storage are not asked for."""
    worker = built()
    shards, made = list(worker.backend.named_shards()), []

    def lazily():
        for name, box, values in shards:
            yield name, box, LazyShard(box.shape, lambda n=name, v=values: made.append(n) or v)

    monkeypatch.setattr(worker.backend, "named_shards", lazily)
    worker.hybrid.begin(1)
    worker.hybrid.transfer(1)
    shared = worker.hybrid._shared
    assert shared and sorted(made) == sorted(name for name, _, _ in shards)


def test_what_a_sync_takes_is_told_before_the_first_one(built, context):
    size = sum(tensor.numel() for tensor in reference().parameters.values()) * 4
    worker = built(alias=False)

    def cost(share: bool):
        return hybrid_engine(worker, share=share).prepare()

    apart = cost(share=False)
    assert (apart.received, apart.rounds, apart.transport) == (0, 0, "Collective")
    assert apart.peak == 2 * size
    assert size < cost(share=True).peak < 2 * size


def test_a_wrong_element_is_named_and_the_next_sync_mends_it(built, monkeypatch):
    worker = built(verify=True)
    take = worker.engine.receive

    def wrong(name, box, values):
        take(name, box, values + 1 if name == DOWN else values)

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "receive", wrong)
        with pytest.raises(
            HybridFlowError,
            match=f"weights of version 0: 1 parameters differ .* the first is {DOWN}",
        ):
            worker.hybrid.sync()
    [asked] = requests([[1, 2]], SamplingParams(max_tokens=2))
    assert "was begun and not ended" in said_by(lambda: worker.engine.generate([asked]))
    worker.hybrid.sync()
    assert unequal(worker) == []


def test_what_the_engine_says_of_a_box_that_it_does_not_take_is_raised(built, monkeypatch):
    worker = built()

    def refuses(name, box, values):
        raise ValueError(f"no place for {name}")

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "receive", refuses)
        with pytest.raises(ValueError, match="no place for model"):
            worker.hybrid.sync()
    assert worker.engine.updating
    worker.hybrid.sync()
    assert unequal(worker) == []


def test_an_engine_of_another_model_is_told_of_and_not_touched(built, context):
    worker = built()
    theirs = worker.engine.layout()
    params = {name: param for name, param in theirs.params.items() if name != NORM}
    params[DOWN] = attrs.evolve(params[DOWN], shape=(3, 3))
    held = {0: {name: (Box.full(param.shape),) for name, param in params.items()}}
    worker.engine.layout = lambda: WeightLayout(params, held, theirs.ties)
    with pytest.raises(ReshardError, match="2 problems, and nothing was moved") as caught:
        hybrid_engine(worker)
    assert f"{NORM} [32] of the source is not in the target" in str(caught.value)
    assert f"{DOWN} is [32, 48] in the source, [3, 3] in the target" in str(caught.value)
    assert not worker.engine.updating
