"""Who holds what, checkpoints, exports, offload and the hand-over to a rollout engine."""

from __future__ import annotations

import json
import shutil

import attrs
import pytest
import torch
from helpers.training_jobs import (
    OPTIMIZER,
    Setup,
    broken_transfer,
    export,
    failing_build,
    failing_load,
    failing_update,
    holdings,
    load_and_train,
    moved,
    reload,
    save_after,
    synced_training,
    train,
)
from helpers.training_reference import MODELS, Blend, Nothing, ValueLoss, load, make_batch, spec_of

from hybridflow.backends.fsdp.backend import FSDPBackend
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.core.values.model import ModelSpec
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.values.weights import Box

ONE = ParallelLayout()
DP2, TP2, DP4, DP2_TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(dp=4), ParallelLayout(dp=2, tp=2)
LAYOUTS = [
    ("qwen2-tied", ONE, FSDPConfig()),
    ("llama", ONE, FSDPConfig(precision="bf16")),
    ("qwen2-odd", DP2, FSDPConfig()),
    ("qwen2-tied", TP2, FSDPConfig()),
    ("llama-odd", DP4, FSDPConfig(wrap_min_parameters=0)),
    ("qwen2-odd", DP4, FSDPConfig(replicas=2)),
    ("qwen2-tied", DP2_TP2, FSDPConfig(wrap_min_parameters=0)),
    ("llama", DP2_TP2, FSDPConfig(replicas=2)),
    ("llama", ParallelLayout(dp=2, tp=2, order="dp-tp-cp-pp"), FSDPConfig()),
]


@pytest.mark.parametrize(("name", "layout", "config"), LAYOUTS, ids=str)
def test_boxes_of_all_ranks_make_up_the_parameters_bit_for_bit(ranks, folder, name, layout, config):
    found = ranks(holdings, layout.world, Setup(folder(name), layout=layout, config=config))
    want = dict(load(folder(name)).named_parameters())
    said = found[0]["layout"]
    assert set(said.params) == set(want)
    tied = MODELS[name][1]
    assert said.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    copies = config.replicas
    for parameter, whole in want.items():
        assert said.params[parameter].shape == tuple(whole.shape)
        filled, times = torch.full_like(whole, torch.nan), torch.zeros_like(whole)
        for rank, answer in enumerate(found):
            held = [(box, tensor) for n, box, tensor in answer["shards"] if n == parameter]
            assert tuple(box for box, _ in held) == answer["layout"].held[rank][parameter] == said.held[rank][parameter]
            for box, tensor in held:
                filled[box.slices()] = tensor
                times[box.slices()] += 1
            assert torch.equal(answer["whole"][parameter], whole)
        assert torch.equal(filled, whole)
        assert times.unique().tolist() in ([copies], [copies * layout.tp])  # the same number of times everywhere


def test_sizes_that_nothing_divides_are_cut_as_torch_cuts_them(ranks, folder):
    found = ranks(holdings, 4, Setup(folder("qwen2-odd"), layout=DP4))
    held = [found[0]["layout"].held[rank]["model.embed_tokens.weight"] for rank in range(4)]
    assert held == [(Box((a, 0), (b, 64)),) for a, b in ((0, 17), (17, 34), (34, 51), (51, 67))]


@pytest.mark.parametrize("vocab", [66, 2])
def test_tensor_parallel_pieces_that_dp_does_not_divide_are_whole_again(ranks, tmp_path, vocab):
    """A parameter that is cut twice in one dim, unevenly: 66 rows are 33 per tp rank, cut into 17 and 16."""
    config = {"model_type": "qwen2", "vocab_size": vocab, "hidden_size": 8, "intermediate_size": 6}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    setup = Setup("", layout=DP2_TP2, model=ModelSpec(config, None, 3))
    batch = make_batch(5, vocab=vocab)
    checkpoint, copy = str(tmp_path / "checkpoint"), str(tmp_path / "hf")
    before = ranks(save_after, 4, setup, [(batch, Nothing())], 1, checkpoint, 0)[0]["saved"]
    one = attrs.evolve(setup, layout=ONE)
    assert_equal(ranks(holdings, 1, one)[0]["whole"], before)  # the same model was drawn on every rank
    trained = ranks(save_after, 4, setup, [(batch, Blend())], 2, str(tmp_path / "trained"), 1)[0]
    for layout in (ONE, DP2_TP2, TP2, DP4):
        there = attrs.evolve(setup, layout=layout)
        again = ranks(load_and_train, layout.world, there, [(batch, Blend())], str(tmp_path / "trained"), 1)[0]
        assert_equal(again["loaded"], trained["saved"])
        for name, tensor in again["end"].items():
            torch.testing.assert_close(tensor, trained["end"][name], rtol=1e-4, atol=1e-6)
    ranks(export, 4, setup, [], copy)
    assert_equal(dict(load(copy).named_parameters()), before)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


# Checkpoints
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
    setup, pairs = Setup(folder("qwen2-tied"), layout=layout, config=config), [(make_batch(6), Blend())]
    first = ranks(save_after, layout.world, setup, pairs, 2, str(tmp_path / "c"), 2)
    other = attrs.evolve(setup, path=folder("qwen2"), model=attrs.evolve(spec_of(folder("qwen2-tied")), init_seed=5))
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


@pytest.mark.parametrize(("saved", "loaded"), [(DP2, ONE), (ONE, DP2), (DP4, TP2), (DP2_TP2, DP4)], ids=str)
def test_a_checkpoint_loads_exactly_on_another_number_of_ranks(ranks, folder, tmp_path, saved, loaded):
    pairs = [(make_batch(8), Blend())]
    first = ranks(save_after, saved.world, Setup(folder("qwen2-tied"), layout=saved), pairs, 2, str(tmp_path / "c"), 1)[
        0
    ]
    setup = Setup(folder("qwen2-tied"), layout=loaded)
    second = ranks(load_and_train, loaded.world, setup, pairs, str(tmp_path / "c"), 1)
    for answer in second:
        assert_equal(answer["loaded"], first["saved"])
        for name, tensor in answer["end"].items():
            torch.testing.assert_close(tensor, first["end"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [ONE, DP2], ids=str)
@pytest.mark.parametrize("config", [FSDPConfig(), FSDPConfig(reshard_after_forward=False)], ids=["zero3", "zero2"])
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
            name: tmp_path / f"{name}-{layout}" for name in ("missing", "empty", "cut", "no-counters", "other-model")
        }
        bad["empty"].mkdir()
        for name in ("cut", "no-counters"):
            shutil.copytree(good, bad[name])
        next(bad["cut"].glob("*.distcp")).write_bytes(b"half")
        (bad["no-counters"] / "counters.json").write_text("{")
        other = Setup(folder("qwen2-odd"), layout=layout)
        ranks(save_after, layout.world, other, [(make_batch(4), Blend())], 1, str(bad["other-model"]), 0)
        for path in bad.values():
            for said in ranks(failing_load, layout.world, setup, str(path)):
                assert said.startswith(f"CheckpointError: the checkpoint {path} of role 'actor' cannot be read: ")
                assert "\n" not in said


def test_a_checkpoint_without_an_optimizer_does_not_load_into_a_trained_role(ranks, folder, tmp_path):
    frozen = Setup(folder("llama"), optimizer=None)
    ranks(save_after, 1, frozen, [], 0, str(tmp_path / "c"), 0)
    assert "optimizer" in ranks(failing_load, 1, attrs.evolve(frozen, optimizer=OPTIMIZER), str(tmp_path / "c"))[0]


# Exports
@pytest.mark.parametrize("name", ["qwen2-tied", "llama"])
@pytest.mark.parametrize("layout", [ONE, DP2, DP2_TP2], ids=str)
def test_an_export_loads_in_hugging_face_and_as_the_next_stage(ranks, folder, tmp_path, name, layout):
    from safetensors import safe_open

    out = tmp_path / "export"
    trained = ranks(export, layout.world, Setup(folder(name), layout=layout), [(make_batch(6), Blend())], str(out))[0]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(trained)
        assert ("lm_head.weight" in file.keys()) != MODELS[name][1]  # noqa: SIM118
    model, original = load(str(out)), load(folder(name))
    assert_equal(dict(model.named_parameters()), trained)
    if MODELS[name][1]:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    ours, theirs = (json.loads((p / "config.json").read_text()) for p in (out, out.__class__(folder(name))))
    for key in ("architectures", "use_cache", "attention_dropout", "tie_word_embeddings", "vocab_size"):
        assert ours.get(key) == theirs.get(key), key
    assert not torch.equal(original.model.embed_tokens.weight, trained["model.embed_tokens.weight"])
    assert_equal(ranks(holdings, layout.world, Setup(str(out), layout=layout))[-1]["whole"], trained)


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_value_model_exports_as_a_sequence_classifier(ranks, folder, tmp_path, kind):
    setup = Setup(folder("qwen2", "value"), kind, DP2)
    trained = ranks(export, 2, setup, [], str(tmp_path / "e"))[0]
    model = load(str(tmp_path / "e"), kind)
    assert model.config.num_labels == 1
    assert_equal(dict(model.named_parameters()), trained)


def test_a_critic_from_a_policy_has_a_new_head_from_the_seed(ranks, folder):
    specs = [attrs.evolve(spec_of(folder("qwen2-tied"), "value"), init_seed=seed) for seed in (0, 0, 1)]
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
        ranks(holdings, layout.world, Setup("", layout=layout, model=ModelSpec(config, None, seed)))[-1]["whole"]
        for layout, seed in ((ONE, 0), (DP2_TP2, 0), (DP2, 1))
    ]
    assert_equal(found[0], found[1])
    assert not torch.equal(found[0]["lm_head.weight"], found[2]["lm_head.weight"])


# Memory
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
    setup = Setup(folder("qwen2-odd" if layout.tp == 1 else "qwen2-tied"), layout=layout, config=config)
    pairs = [(make_batch(7), Blend())]
    got = ranks(moved, layout.world, setup, pairs, 2)
    want = ranks(train, layout.world, setup, pairs, 2)
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b["parameters"])


# Errors
def test_layouts_that_cannot_work_are_named_before_anything_starts():
    assert not FSDPBackend.problems(FSDPConfig(replicas=2), DP4, "policy")
    assert "replicas 3 and dp 4" in FSDPBackend.problems(FSDPConfig(replicas=3), DP4, "policy")[0]


def test_tensor_parallelism_refuses_sizes_that_it_cannot_cut(ranks, folder):
    said = ranks(failing_build, 2, Setup(folder("qwen2-odd"), layout=TP2))
    assert said == ["ModelError: tp 2 must divide the model's vocab_size 67; choose a smaller layout.tp"] * 2
    config = {"model_type": "gpt2", "vocab_size": 68, "n_embd": 32, "n_layer": 1, "n_head": 2}
    said = ranks(failing_build, 2, Setup("", layout=TP2, model=ModelSpec(config, None, 0)))
    assert "needs a Llama-like model" in said[0]


@pytest.mark.parametrize("layout", [ONE, DP2], ids=str)
def test_a_loss_that_is_not_finite_stops_every_rank_and_changes_no_weights(ranks, folder, layout):
    batch = make_batch(6)
    advantages = batch["advantages"].values.clone()
    advantages[:3] = torch.inf  # of rank 0 alone
    batch = batch.with_columns(advantages=attrs.evolve(batch["advantages"], values=advantages))
    for text, unchanged in ranks(failing_update, layout.world, Setup(folder("llama"), layout=layout), batch, Blend()):
        assert "HybridFlowError: an update of role 'actor' after 0 steps: the gradient norm is nan" in text
        assert unchanged


def test_an_output_that_a_model_does_not_have_is_refused_by_name(ranks, folder):
    text, _ = ranks(failing_update, 1, Setup(folder("llama")), make_batch(4), ValueLoss())[0]
    assert "a policy model has no output 'values'; it has logprobs, entropy" in text


# The rollout engine
@pytest.mark.parametrize("layout", [DP2, TP2], ids=str)
def test_engine_and_trainer_agree_after_every_update(ranks, folder, layout):
    setup = Setup(folder("qwen2-tied"), layout=layout, engine="transformers", temperature=0.9)
    for worst in ranks(synced_training, layout.world, setup, make_batch(8), Blend(), 3):
        assert max(worst) < 1e-5


def test_a_transfer_that_fails_half_way_leaves_an_engine_that_refuses_and_the_next_one_mends_it(ranks, folder):
    setup = Setup(folder("qwen2-tied"), layout=DP2, engine="transformers")
    found = ranks(broken_transfer, 2, setup, make_batch(6), Blend())
    assert found[0]["said"][0] == "the link is down"
    assert "was begun and not ended" in found[0]["said"][1]
    assert "failed on another rank" in found[1]["said"][0]
    assert "was begun and not ended" in found[1]["said"][1]
    assert max(answer["worst"] for answer in found) < 1e-5
