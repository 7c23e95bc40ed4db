"""Training over ranks against single-process Hugging Face."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.training_check import check, close
from helpers.training_jobs import Setup, evaluate, outputs, train
from helpers.training_reference import (
    MODELS,
    Blend,
    GroupLoss,
    Nothing,
    PairLoss,
    ScoreLoss,
    TopkLoss,
    ValueLoss,
    hf_loss,
    hf_outputs,
    load,
    make_batch,
    rows_of,
)

from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout

ONE = ParallelLayout()
DP2, TP2, DP4, DP2_TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(dp=4), ParallelLayout(dp=2, tp=2)
HSDP = FSDPConfig(replicas=2, wrap_min_parameters=0)
WRAPPED = FSDPConfig(wrap_min_parameters=0)


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_trains_as_hugging_face_does(ranks, folder, name):
    check(ranks, folder, name, Setup(""), Blend())


@pytest.mark.parametrize(
    ("name", "layout", "config"),
    [
        ("qwen2-odd", DP2, FSDPConfig()),
        ("llama-odd", DP2, WRAPPED),
        ("llama-odd", DP2, FSDPConfig(wrap_min_parameters=0, reshard_after_forward=False)),
        ("qwen2-tied", TP2, FSDPConfig()),
        ("llama", TP2, FSDPConfig()),
        ("qwen2-tied", DP2_TP2, WRAPPED),
        ("llama", DP2_TP2, FSDPConfig()),
        ("llama-tied", ParallelLayout(dp=2, tp=2, order="dp-tp-cp-pp"), FSDPConfig()),
        ("qwen2-odd", DP4, HSDP),
        ("llama", ParallelLayout(dp=2, tp=2), FSDPConfig(replicas=2)),
        ("qwen2", DP4, FSDPConfig()),
    ],
    ids=str,
)
def test_every_layout_trains_as_hugging_face_does(ranks, folder, name, layout, config):
    check(ranks, folder, name, Setup("", layout=layout, config=config), Blend())


@pytest.mark.parametrize(("layout", "tokens"), [(ONE, 1), (ONE, 40), (DP2, 1), (DP2, 10_000), (DP2_TP2, 40)], ids=str)
def test_the_size_of_micro_batches_changes_nothing(ranks, folder, layout, tokens):
    check(ranks, folder, "qwen2-tied", Setup("", layout=layout, micro_batch_tokens=tokens), Blend(), steps=2)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_ranks_with_fewer_rows_or_none_take_part(ranks, folder, rows):
    check(ranks, folder, "llama-odd", Setup("", layout=DP4, micro_batch_tokens=12), Blend(), rows=rows, steps=2)


@pytest.mark.parametrize("loss", [PairLoss(), GroupLoss()], ids=lambda loss: loss.unit)
def test_units_are_never_split(ranks, folder, loss):
    for layout in (ONE, DP2):
        check(ranks, folder, "qwen2", Setup("", layout=layout, micro_batch_tokens=10), loss, rows=10, steps=1)


@pytest.mark.parametrize(("kind", "loss"), [("value", ValueLoss()), ("score", ScoreLoss())], ids=["value", "score"])
@pytest.mark.parametrize("layout", [ONE, DP2, TP2, DP2_TP2], ids=str)
def test_value_and_score_models_train_as_hugging_face_does(ranks, folder, kind, loss, layout):
    check(ranks, folder, "qwen2", Setup("", kind=kind, layout=layout), loss, steps=2)


def test_top_k_outputs_have_gradients(ranks, folder):
    check(ranks, folder, "llama", Setup("", layout=DP2_TP2), TopkLoss(), rows=1, steps=1)


def test_temperature_scales_the_logits(ranks, folder):
    check(ranks, folder, "llama", Setup("", layout=DP2, temperature=0.7), Blend(), steps=1)


def test_large_gradients_are_clipped_to_the_norm_and_small_ones_are_not(ranks, folder):
    for limit in (1e-3, 1e3):
        optimizer = OptimizerConfig(lr=1e-2, max_grad_norm=limit, eps=1e-2)  # eps makes AdamW feel the scale
        check(ranks, folder, "qwen2-tied", Setup("", layout=DP2_TP2, optimizer=optimizer), Blend(), steps=2)


@pytest.mark.parametrize("layout", [ONE, DP2, DP2_TP2], ids=str)
def test_pairs_of_batch_and_loss_add_up_in_one_update(ranks, folder, layout):
    path = folder("qwen2-tied")
    first, second = make_batch(5), make_batch(3, seed=9)
    setup = Setup(path, layout=layout, micro_batch_tokens=30)
    got = ranks(train, layout.world, setup, [(first, Blend()), (second, TopkLoss())])
    model = load(path)
    total = hf_loss(model, first, Blend())[0] + hf_loss(model, second, TopkLoss())[0]
    total.backward()
    metrics = Metrics.merge([got[layout.rank(dp=i)]["metrics"][0] for i in range(layout.dp)])
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    for parameter, p in model.named_parameters():
        close(got[-1]["grads"][parameter], p.grad, 1e-5, parameter)


@pytest.mark.parametrize("layout", [ONE, DP2], ids=str)
def test_a_loss_whose_weights_are_all_zero_changes_nothing(ranks, folder, layout):
    got = ranks(train, layout.world, Setup(folder("llama"), layout=layout), [(make_batch(6), Nothing())])
    want = dict(load(folder("llama")).named_parameters())
    metrics = Metrics.merge([answer["metrics"][0] for answer in got])
    assert metrics["grad_norm"] == 0.0
    assert metrics["loss"] == 0.0
    assert metrics["nll"] > 0
    for parameter, tensor in got[0]["parameters"].items():
        assert torch.equal(tensor, want[parameter])


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        (ONE, FSDPConfig(activation_checkpointing=True)),
        (DP2, FSDPConfig(activation_checkpointing=True, wrap_min_parameters=0)),
        (DP2_TP2, FSDPConfig(activation_checkpointing=True, wrap_min_parameters=0)),
        (ONE, FSDPConfig(cpu_offload=True)),
        (DP2, FSDPConfig(cpu_offload=True, wrap_min_parameters=0, reshard_after_forward=False)),
        (DP2_TP2, FSDPConfig(cpu_offload=True)),
    ],
    ids=str,
)
def test_options_that_save_memory_do_not_change_the_numbers(ranks, folder, layout, config):
    check(ranks, folder, "qwen2-tied", Setup("", layout=layout, config=config), Blend(), steps=2)


@pytest.mark.parametrize("layout", [ONE, DP2_TP2], ids=str)
def test_logits_that_are_made_in_pieces_give_the_same_numbers(ranks, folder, layout):
    setup = Setup("", layout=layout, micro_batch_tokens=10_000, temperature=0.7, logits_at_once=68 * 5)
    check(ranks, folder, "qwen2-tied", setup, Blend(), steps=2)
    check(ranks, folder, "llama", setup, TopkLoss(), steps=1)


def test_bf16_is_near_to_float32(ranks, folder):
    path = folder("qwen2-tied")
    for layout in (ONE, DP2_TP2):
        config = FSDPConfig(precision="bf16", wrap_min_parameters=0)
        got = ranks(train, layout.world, Setup(path, layout=layout, config=config), [(make_batch(7), TopkLoss())])
        model = load(path)
        value, _ = hf_loss(model, make_batch(7), TopkLoss())
        value.backward()
        metrics = Metrics.merge([got[layout.rank(dp=i)]["metrics"][0] for i in range(layout.dp)])
        assert metrics["loss"] == pytest.approx(float(value.detach()), rel=2e-2)
        for parameter, p in model.named_parameters():
            grad = got[0]["grads"][parameter]
            assert grad.dtype == torch.float32  # of the masters
            assert torch.nn.functional.cosine_similarity(grad.flatten(), p.grad.flatten(), dim=0) > 0.98, parameter


@pytest.mark.parametrize("kind", ["policy", "value", "score"])
@pytest.mark.parametrize("layout", [ONE, DP2, DP2_TP2], ids=str)
def test_outputs_stand_at_the_tokens_that_hugging_face_gives_them(ranks, folder, kind, layout):
    path, batch = folder("qwen2-tied", kind), make_batch(9)
    setup = Setup(
        path, kind, layout, optimizer=None, micro_batch_tokens=25, temperature=1.0 if kind != "policy" else 0.8
    )
    got = ranks(outputs, layout.world, setup, batch)
    model = load(path, kind)
    rows = []
    for i in range(layout.dp):
        answer = got[layout.rank(dp=i)]
        rows += [dict(zip(answer, values, strict=True)) for values in zip(*answer.values(), strict=True)]
    assert len(rows) == batch.rows
    with torch.no_grad():
        for row, mine in zip(rows_of(batch), rows, strict=True):
            want = hf_outputs(model, row, kind, setup.temperature)
            for name, value in mine.items():
                assert value.dtype == (torch.int64 if name == "topk_ids" else torch.float32)
                renamed = {"topk_ids": "largest_ids", "topk_logprobs": "largest_logprobs"}.get(name, name)
                torch.testing.assert_close(value, want[renamed], rtol=1e-5, atol=2e-6)


def test_a_frozen_bf16_model_gives_outputs_near_to_float32(ranks, folder):
    path, batch = folder("llama"), make_batch(6)
    setup = Setup(path, layout=DP2, optimizer=None, config=FSDPConfig(precision="bf16"))
    got = ranks(outputs, 2, setup, batch)
    want = ranks(outputs, 1, attrs.evolve(setup, layout=ONE, config=FSDPConfig()), batch)[0]["logprobs"].values
    values = torch.cat([answer["logprobs"].values for answer in got])
    assert values.dtype == torch.float32
    assert 0 < (values - want).abs().max() < 0.1


def test_metrics_do_not_depend_on_the_split(ranks, folder):
    path, batch = folder("qwen2-tied"), make_batch(11)
    found = []
    for layout, tokens in ((ONE, 10_000), (ONE, 15), (DP2, 10_000), (DP2, 15), (DP2_TP2, 15)):
        got = ranks(evaluate, layout.world, Setup(path, layout=layout, micro_batch_tokens=tokens), batch, Blend())
        found.append(Metrics.merge([got[layout.rank(dp=i)] for i in range(layout.dp)]))
    assert {"a", "entropy", "loss", "mismatch_mean", "mismatch_kl"} <= set(found[0].means)
    for metrics in found[1:]:
        assert set(metrics.means) == set(found[0].means)
        for name, (total, count) in found[0].means.items():
            assert metrics.means[name] == (pytest.approx(total, rel=1e-4, abs=1e-5), count), name
        assert metrics.maxima == pytest.approx(found[0].maxima, rel=1e-5)


def test_the_mismatch_with_the_rollout_engine_is_measured_on_tokens_of_the_present_weights(ranks, folder):
    path, batch = folder("qwen2-tied"), make_batch(8)
    metrics = ranks(evaluate, 1, Setup(path, temperature=0.9), batch, TopkLoss())[0].values()
    model, rows = load(path), rows_of(batch)
    with torch.no_grad():
        d = [hf_outputs(model, r, "policy", 0.9)["logprobs"] - r["rollout_logprobs"] for r in rows]
    now = [(r["loss_mask"] > 0) & (r["weight_version"] == 0) for r in rows]
    d = torch.cat([x[m] for x, m in zip(d, now, strict=True)])
    assert metrics["mismatch_mean"] == pytest.approx(float(d.abs().mean()), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(float((d.exp() - 1 - d).mean()), rel=1e-4)
    assert metrics["mismatch_max_ratio"] == pytest.approx(float(d.abs().exp().max()), rel=1e-4)
