"""Training over ranks against single-process Hugging Face; checkpoints, exports and rollouts."""

from __future__ import annotations

import json
import shutil

import attrs
import pytest
import torch
from helpers import training_reference
from helpers.training_check import assert_equal, check, close
from helpers.training_jobs import (
    OPTIMIZER,
    Setup,
    disagreeing_update,
    evaluate,
    export,
    failing_load,
    failing_update,
    holdings,
    load_and_train,
    moved,
    outputs,
    reload,
    save_after,
    train,
)
from helpers.training_reference import (
    MODELS,
    Blend,
    GroupLoss,
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
from helpers.zoo_cells import write_model as write_zoo_model
from safetensors.torch import load_file

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.contracts.training import OptimizerConfig
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.kit.testing import tiny_config

ONE = ParallelLayout()
MODEL = ModelSpec(tiny_config("qwen2"), None, 0)
DP2, TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2)
DP4, DP2_TP2 = ParallelLayout(dp=4), ParallelLayout(dp=2, tp=2)
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


@pytest.mark.parametrize(
    ("layout", "tokens"), [(ONE, 1), (ONE, 40), (DP2, 1), (DP2, 10_000), (DP2_TP2, 40)], ids=str
)
def test_the_size_of_micro_batches_changes_nothing(ranks, folder, layout, tokens):
    check(
        ranks,
        folder,
        "qwen2-tied",
        Setup("", layout=layout, micro_batch_tokens=tokens),
        Blend(),
        steps=2,
    )


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_ranks_with_fewer_rows_or_none_take_part(ranks, folder, rows):
    check(
        ranks,
        folder,
        "llama-odd",
        Setup("", layout=DP4, micro_batch_tokens=12),
        Blend(),
        rows=rows,
        steps=2,
    )


@pytest.mark.parametrize("loss", [PairLoss(), GroupLoss()], ids=lambda loss: loss.unit)
def test_units_are_never_split(ranks, folder, loss):
    for layout in (ONE, DP2):
        check(
            ranks,
            folder,
            "qwen2",
            Setup("", layout=layout, micro_batch_tokens=10),
            loss,
            rows=10,
            steps=1,
        )


@pytest.mark.parametrize(
    ("kind", "loss"), [("value", ValueLoss()), ("score", ScoreLoss())], ids=["value", "score"]
)
@pytest.mark.parametrize("layout", [ONE, DP2, TP2, DP2_TP2], ids=str)
def test_value_and_score_models_train_as_hugging_face_does(ranks, folder, kind, loss, layout):
    check(ranks, folder, "qwen2", Setup("", kind=kind, layout=layout), loss, steps=2)


def test_top_k_outputs_have_gradients(ranks, folder):
    check(ranks, folder, "llama", Setup("", layout=DP2_TP2), TopkLoss(), rows=1, steps=1)


def test_temperature_scales_the_logits(ranks, folder):
    check(ranks, folder, "llama", Setup("", layout=DP2, temperature=0.7), Blend(), steps=1)


def test_large_gradients_are_clipped_to_the_norm_and_small_ones_are_not(ranks, folder):
    for limit in (1e-3, 1e3):
        optimizer = OptimizerConfig(
            lr=1e-2, max_grad_norm=limit, eps=1e-2
        )  # eps makes AdamW feel the scale
        check(
            ranks,
            folder,
            "qwen2-tied",
            Setup("", layout=DP2_TP2, optimizer=optimizer),
            Blend(),
            steps=2,
        )


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
    setup = Setup(
        "", layout=layout, micro_batch_tokens=10_000, temperature=0.7, logits_at_once=68 * 5
    )
    check(ranks, folder, "qwen2-tied", setup, Blend(), steps=2)
    check(ranks, folder, "llama", setup, TopkLoss(), steps=1)


def test_bf16_is_near_to_float32(ranks, folder):
    path = folder("qwen2-tied")
    for layout in (ONE, DP2_TP2):
        config = FSDPConfig(precision="bf16", wrap_min_parameters=0)
        got = ranks(
            train,
            layout.world,
            Setup(path, layout=layout, config=config),
            [(make_batch(7), TopkLoss())],
        )
        model = load(path)
        value, _ = hf_loss(model, make_batch(7), TopkLoss())
        value.backward()
        metrics = Metrics.merge([got[layout.rank(dp=i)]["metrics"][0] for i in range(layout.dp)])
        assert metrics["loss"] == pytest.approx(float(value.detach()), rel=2e-2)
        for parameter, p in model.named_parameters():
            grad = got[0]["grads"][parameter]
            assert grad.dtype == torch.float32  # of the masters
            assert (
                torch.nn.functional.cosine_similarity(grad.flatten(), p.grad.flatten(), dim=0)
                > 0.98
            ), parameter


@pytest.mark.parametrize("kind", ["policy", "value", "score"])
@pytest.mark.parametrize("layout", [ONE, DP2, DP2_TP2], ids=str)
def test_outputs_stand_at_the_tokens_that_hugging_face_gives_them(ranks, folder, kind, layout):
    path, batch = folder("qwen2-tied", kind), make_batch(9)
    setup = Setup(
        path,
        kind,
        layout,
        optimizer=None,
        micro_batch_tokens=25,
        temperature=1.0 if kind != "policy" else 0.8,
    )
    got = ranks(outputs, layout.world, setup, batch)
    model = load(path, kind)
    rows = []
    for i in range(layout.dp):
        answer = got[layout.rank(dp=i)]
        rows += [
            dict(zip(answer, values, strict=True)) for values in zip(*answer.values(), strict=True)
        ]
    assert len(rows) == batch.rows
    with torch.no_grad():
        for row, mine in zip(rows_of(batch), rows, strict=True):
            want = hf_outputs(model, row, kind, setup.temperature)
            for name, value in mine.items():
                assert value.dtype == (torch.int64 if name == "topk_ids" else torch.float32)
                renamed = {"topk_ids": "largest_ids", "topk_logprobs": "largest_logprobs"}.get(
                    name, name
                )
                torch.testing.assert_close(value, want[renamed], rtol=1e-5, atol=2e-6)


def test_a_frozen_bf16_model_gives_outputs_near_to_float32(ranks, folder):
    path, batch = folder("llama"), make_batch(6)
    setup = Setup(path, layout=DP2, optimizer=None, config=FSDPConfig(precision="bf16"))
    got = ranks(outputs, 2, setup, batch)
    want = ranks(outputs, 1, attrs.evolve(setup, layout=ONE, config=FSDPConfig()), batch)[0][
        "logprobs"
    ].values
    values = torch.cat([answer["logprobs"].values for answer in got])
    assert values.dtype == torch.float32
    assert 0 < (values - want).abs().max() < 0.1


def test_metrics_do_not_depend_on_the_split(ranks, folder):
    path, batch = folder("qwen2-tied"), make_batch(11)
    found = []
    for layout, tokens in ((ONE, 10_000), (ONE, 15), (DP2, 10_000), (DP2, 15), (DP2_TP2, 15)):
        got = ranks(
            evaluate,
            layout.world,
            Setup(path, layout=layout, micro_batch_tokens=tokens),
            batch,
            Blend(),
        )
        found.append(Metrics.merge([got[layout.rank(dp=i)] for i in range(layout.dp)]))
    assert {"a", "entropy", "loss", "mismatch_mean", "mismatch_kl"} <= set(found[0].means)
    for metrics in found[1:]:
        assert set(metrics.means) == set(found[0].means)
        for name, (total, count) in found[0].means.items():
            assert metrics.means[name] == (pytest.approx(total, rel=1e-4, abs=1e-5), count), name
        assert metrics.maxima == pytest.approx(found[0].maxima, rel=1e-5)


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        (ONE, FSDPConfig()),
        (DP2, FSDPConfig()),
        (DP2_TP2, FSDPConfig(wrap_min_parameters=0)),
        (DP4, FSDPConfig(replicas=2)),
        (DP2, FSDPConfig(precision="bf16")),
        (DP2, FSDPConfig(cpu_offload=True)),
    ],
    ids=str,
)
def test_training_from_a_checkpoint_equals_training_on(ranks, folder, tmp_path, layout, config):
    setup, pairs = (
        Setup(folder("qwen2-tied"), layout=layout, config=config),
        [(make_batch(6), Blend())],
    )
    first = ranks(save_after, layout.world, setup, pairs, 2, str(tmp_path / "c"), 2)
    other = attrs.evolve(
        setup,
        path=folder("qwen2"),
        model=attrs.evolve(training_reference.spec_of(folder("qwen2-tied")), init_seed=5),
    )
    second = ranks(load_and_train, layout.world, other, pairs, str(tmp_path / "c"), 2)
    for before, after in zip(first, second, strict=True):
        assert_equal(after["loaded"], before["saved"])
        assert_equal(after["end"], before["end"])
        assert after["version"] == 4
        assert all(total > 0 for name, total in after["moments"].items() if "exp_avg_sq" in name)


def test_a_checkpoint_before_the_first_step_has_zero_moments(ranks, folder, tmp_path):
    setup, pairs = Setup(folder("llama"), layout=DP2), [(make_batch(6), Blend())]
    first = ranks(save_after, 2, setup, pairs, 0, str(tmp_path / "c"), 2)
    second = ranks(load_and_train, 2, setup, pairs, str(tmp_path / "c"), 2)
    assert_equal(second[0]["end"], first[0]["end"])
    assert set(second[0]["moments"].values()) == {0.0}


@pytest.mark.parametrize(
    ("saved", "loaded"), [(DP2, ONE), (ONE, DP2), (DP4, TP2), (DP2_TP2, DP4)], ids=str
)
def test_a_checkpoint_loads_exactly_on_another_number_of_ranks(
    ranks, folder, tmp_path, saved, loaded
):
    pairs = [(make_batch(8), Blend())]
    first = ranks(
        save_after,
        saved.world,
        Setup(folder("qwen2-tied"), layout=saved),
        pairs,
        2,
        str(tmp_path / "c"),
        1,
    )[0]
    setup = Setup(folder("qwen2-tied"), layout=loaded)
    second = ranks(load_and_train, loaded.world, setup, pairs, str(tmp_path / "c"), 1)
    for answer in second:
        assert_equal(answer["loaded"], first["saved"])
        for name, tensor in answer["end"].items():
            torch.testing.assert_close(tensor, first["end"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [ONE, DP2], ids=str)
@pytest.mark.parametrize(
    "config", [FSDPConfig(), FSDPConfig(reshard_after_forward=False)], ids=["zero3", "zero2"]
)
def test_a_forward_after_loading_uses_the_loaded_weights(ranks, folder, tmp_path, layout, config):
    trained = Setup(folder("qwen2-tied"), layout=layout, config=config)
    ranks(save_after, layout.world, trained, [(make_batch(6), Blend())], 2, str(tmp_path / "c"), 0)
    for before, after in ranks(reload, layout.world, trained, str(tmp_path / "c")):
        assert (before - after).abs().max() > 1e-3


def test_an_unreadable_checkpoint_is_an_error_that_names_it(ranks, folder, tmp_path):
    for layout in (ONE, DP2):
        setup, good = Setup(folder("llama"), layout=layout), tmp_path / f"good-{layout}"
        ranks(save_after, layout.world, setup, [(make_batch(4), Blend())], 1, str(good), 0)
        bad = {
            name: tmp_path / f"{name}-{layout}"
            for name in ("missing", "empty", "cut", "no-index", "other-model")
        }
        bad["empty"].mkdir()
        for name in ("cut", "no-index"):
            shutil.copytree(good, bad[name])
        next(bad["cut"].glob("*.safetensors")).write_bytes(b"half")
        (bad["no-index"] / "index-00000-of-00001.json").write_text("{")
        other = Setup(folder("qwen2-odd"), layout=layout)
        ranks(
            save_after,
            layout.world,
            other,
            [(make_batch(4), Blend())],
            1,
            str(bad["other-model"]),
            0,
        )
        for path in bad.values():
            for said in ranks(failing_load, layout.world, setup, str(path)):
                kind = "Checkpoint" if path.name.startswith("other") else "Damaged"
                assert said.startswith(f"{kind}Error: the checkpoint {path} of role 'actor' ")
                assert "\n" not in said


def test_a_checkpoint_without_an_optimizer_does_not_load_into_a_trained_role(
    ranks, folder, tmp_path
):
    frozen = Setup(folder("llama"), optimizer=None)
    ranks(save_after, 1, frozen, [], 0, str(tmp_path / "c"), 0)
    assert (
        "optimizer"
        in ranks(failing_load, 1, attrs.evolve(frozen, optimizer=OPTIMIZER), str(tmp_path / "c"))[0]
    )


# ---- exports ------------------------------------------------------------------------------------


def test_an_export_has_the_buffers_of_its_checkpoint(ranks, tmp_path):
    """The bias by which glm4_moe chooses experts is no parameter."""
    path = write_zoo_model("glm4_moe", 3, tmp_path / "model")
    setup = Setup(str(path), layout=ParallelLayout(dp=2))
    ranks(export, 2, setup, [], str(tmp_path / "export"))
    given = load_file(path / "model.safetensors")
    assert_equal(load_file(tmp_path / "export/model.safetensors"), given)
    assert given["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen2-tied", "llama"])
@pytest.mark.parametrize("layout", [ONE, DP2, DP2_TP2], ids=str)
def test_an_export_loads_in_hugging_face_and_as_the_next_stage(
    ranks, folder, tmp_path, name, layout
):
    from safetensors import safe_open

    out = tmp_path / "export"
    trained = ranks(
        export,
        layout.world,
        Setup(folder(name), layout=layout),
        [(make_batch(6), Blend())],
        str(out),
    )[0]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(trained)
        assert ("lm_head.weight" in file.keys()) != MODELS[name][1]  # noqa: SIM118
    model, original = load(str(out)), load(folder(name))
    assert_equal(dict(model.named_parameters()), trained)
    if MODELS[name][1]:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    ours, theirs = (
        json.loads((p / "config.json").read_text()) for p in (out, out.__class__(folder(name)))
    )
    for key in (
        "architectures",
        "use_cache",
        "attention_dropout",
        "tie_word_embeddings",
        "vocab_size",
    ):
        assert ours.get(key) == theirs.get(key), key
    assert not torch.equal(original.model.embed_tokens.weight, trained["model.embed_tokens.weight"])
    assert_equal(
        ranks(holdings, layout.world, Setup(str(out), layout=layout))[-1]["whole"], trained
    )


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_value_model_exports_as_a_sequence_classifier(ranks, folder, tmp_path, kind):
    setup = Setup(folder("qwen2", "value"), kind, DP2)
    trained = ranks(export, 2, setup, [], str(tmp_path / "e"))[0]
    model = load(str(tmp_path / "e"), kind)
    assert model.config.num_labels == 1
    assert_equal(dict(model.named_parameters()), trained)


def test_a_critic_from_a_policy_has_a_new_head_from_the_seed(ranks, folder):
    specs = [
        attrs.evolve(training_reference.spec_of(folder("qwen2-tied"), "value"), init_seed=seed)
        for seed in (0, 0, 1)
    ]
    found = [ranks(holdings, 4, Setup("", "value", DP2_TP2, model=spec)) for spec in specs]
    heads = [[answer["whole"]["score.weight"] for answer in answers] for answers in found]
    assert all(torch.equal(head, heads[0][0]) for head in heads[0] + heads[1])
    assert not torch.equal(heads[0][0], heads[2][0])
    policy = dict(load(folder("qwen2-tied")).named_parameters())
    for name, tensor in found[0][0]["whole"].items():
        assert name == "score.weight" or torch.equal(tensor, policy[name])


def test_random_weights_come_from_the_seed_alone(ranks):
    config = {"model_type": "llama", "vocab_size": 68, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = [
        ranks(
            holdings, layout.world, Setup("", layout=layout, model=ModelSpec(config, None, seed))
        )[-1]["whole"]
        for layout, seed in ((ONE, 0), (DP2_TP2, 0), (DP2, 1))
    ]
    assert_equal(found[0], found[1])
    assert not torch.equal(found[0]["lm_head.weight"], found[2]["lm_head.weight"])


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        (ONE, FSDPConfig()),
        (DP2, FSDPConfig(wrap_min_parameters=0)),
        (DP2_TP2, FSDPConfig(reshard_after_forward=False)),
    ],
    ids=str,
)
def test_training_goes_on_after_its_storage_has_moved(ranks, folder, layout, config):
    """offload and onload change the device by this path; here the new place is a copy, since a CPU has no other."""
    setup = Setup(
        folder("qwen2-odd" if layout.tp == 1 else "qwen2-tied"), layout=layout, config=config
    )
    pairs = [(make_batch(7), Blend())]
    got = ranks(moved, layout.world, setup, pairs, 2)
    want = ranks(train, layout.world, setup, pairs, 2)
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b["parameters"])


# ---- what is refused ----------------------------------------------------------------------------


def test_layouts_that_cannot_work_are_named_before_anything_starts():
    assert not FSDPBackend.problems(FSDPConfig(replicas=2), DP4, MODEL)
    assert "replicas 3 and dp 4" in FSDPBackend.problems(FSDPConfig(replicas=3), DP4, MODEL)[0]


@pytest.mark.parametrize("layout", [ONE, DP2], ids=str)
def test_a_loss_that_is_not_finite_stops_every_rank_and_changes_no_weights(ranks, folder, layout):
    batch = make_batch(6)
    advantages = batch["advantages"].values.clone()
    advantages[:3] = torch.inf  # of rank 0 alone
    batch = batch.with_columns(advantages=attrs.evolve(batch["advantages"], values=advantages))
    for text, unchanged in ranks(
        failing_update, layout.world, Setup(folder("llama"), layout=layout), batch, Blend()
    ):
        assert "role 'actor' after 0 steps: the gradient norm is nan" in text
        assert unchanged


@pytest.mark.parametrize("layout", [DP2, TP2], ids=str)
def test_what_an_engine_did_not_say_stops_every_rank_and_leaves_nothing(ranks, folder, layout):
    setup = Setup(folder("llama"), layout=layout)
    for text, unchanged, alike in ranks(disagreeing_update, 2, setup, make_batch(6), Blend()):
        assert "MismatchError: an update after 0 steps: logprobs of the rollout engine" in text
        assert unchanged and alike


# ---- the rollout engine -------------------------------------------------------------------------
