"""The HybridEngine: FSDP2's weights in the embedded engine, in any layout of the same ranks, bit for bit."""

import pytest
from helpers.hybrid_jobs import train_and_sync
from helpers.syncs import sync
from helpers.training_jobs import Setup
from helpers.training_reference import Blend, make_batch

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.parallel import ParallelLayout

DP2, TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2)


def setup(path, layout=DP2, tp=2, **changes) -> Setup:
    return Setup(path, layout=layout, engine="transformers", generation_tp=tp, **changes)


def check(found, steps=2, atol=1e-5):
    for answer in found:
        assert answer["wrong"] == []
        assert answer["moved"] == answer["planned"]
        assert answer["tokens"] == found[0]["tokens"]
        assert answer["versions"] == set(range(steps + 1))
        assert answer["worst"] < atol


@pytest.mark.parametrize("model", ["qwen2-odd", "llama-odd", "llama-tied"])
@pytest.mark.parametrize(
    ("layout", "tp"), [(DP2, 2), (TP2, 2), (TP2, 1), (DP2, 1)], ids=lambda v: str(v)
)
def test_the_engine_has_the_trainers_weights_after_every_update(ranks, folder, model, layout, tp):
    if layout == TP2 and "odd" in model:
        model = (
            model.removesuffix("-odd") if model.startswith("llama") else "qwen2-tied"
        )  # the trainer's tp must divide
    found = ranks(train_and_sync, 2, setup(folder(model), layout, tp), make_batch(8), Blend(), 2)
    check(found)
    if layout == TP2 and tp == 2:
        assert found[0]["moved"] == (0, 0)  # the same cut: nothing travels


@pytest.mark.parametrize("transport", ["collective", "shared_memory", "disk"])
def test_every_transport_serves_by_name_in_small_buckets(ranks, folder, transport, tmp_path):
    given = sync(transport=transport, bucket_mb=0.05, verify=True, folder=str(tmp_path))
    found = ranks(train_and_sync, 2, setup(folder("llama"), sync=given), make_batch(8), Blend(), 2)
    check(found)
    assert 0 < max(answer["buffers"] for answer in found) <= 50_000
    assert not list(tmp_path.iterdir())


def test_a_bf16_engine_gets_bf16_values_of_fp32_masters(ranks, folder):
    changes = {"engine_config": {"dtype": "bfloat16"}, "sync": sync(verify=True)}
    found = ranks(
        train_and_sync, 2, setup(folder("qwen2-odd"), **changes), make_batch(8), Blend(), 1
    )
    check(found, steps=1, atol=0.3)
    whole = ranks(train_and_sync, 2, setup(folder("qwen2-odd")), make_batch(8), Blend(), 0)
    assert found[0]["moved"][0] * 2 == whole[0]["moved"][0]


def test_hsdp_replicas_and_dropped_engines_generate_alike(ranks, folder):
    kept = ranks(train_and_sync, 2, setup(folder("llama")), make_batch(8), Blend(), 2)
    dropped = ranks(
        train_and_sync, 2, setup(folder("llama"), keep_engine=False), make_batch(8), Blend(), 2
    )
    replicas = setup(folder("llama"), config=FSDPConfig(replicas=2))
    both = ranks(train_and_sync, 2, replicas, make_batch(8), Blend(), 2)
    check(dropped)
    check(both)
    assert kept[0]["tokens"] == dropped[0]["tokens"] == both[0]["tokens"]
    assert both[0]["moved"] == (0, 0)  # every rank has everything
