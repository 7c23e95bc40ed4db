"""Weights, checkpoints and exports of Megatron and DeepSpeed over ranks; any backend's checkpoint in any other."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.training_check import assert_equal, check, output_ranks
from helpers.training_jobs import (
    Setup,
    export,
    failing_build,
    failing_load,
    holdings,
    load_and_train,
    outputs,
    save_after,
    train,
)
from helpers.training_reference import (
    MODELS,
    Blend,
    Nothing,
    ScoreLoss,
    TopkLoss,
    ValueLoss,
    hf_outputs,
    load,
    make_batch,
    rows_of,
    spec_of,
)

from hybridflow.backends.deepspeed.config import DeepSpeedConfig
from hybridflow.backends.fsdp.config import FSDPConfig
from hybridflow.backends.megatron.config import MegatronConfig
from hybridflow.core.values.parallel import ParallelLayout

DP2, DP4, TP2_PP2 = ParallelLayout(dp=2), ParallelLayout(dp=4), ParallelLayout(tp=2, pp=2)
MEGATRON = Setup("", layout=TP2_PP2, backend="megatron", config=MegatronConfig())
ZERO3 = Setup("", layout=DP2, backend="deepspeed", config=DeepSpeedConfig(stage=3))
FSDP = Setup("", layout=DP2, backend="fsdp", config=FSDPConfig())
SEQUENCE_PARALLEL = attrs.evolve(MEGATRON, config=MegatronConfig(sequence_parallel=True))
SETUPS = {"megatron": MEGATRON, "deepspeed": ZERO3}


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")


@pytest.mark.parametrize("setup", [*SETUPS.values(), SEQUENCE_PARALLEL], ids=[*SETUPS, "sequence"])
@pytest.mark.parametrize("name", ["qwen2-deep", "llama-deep"])
def test_boxes_of_all_ranks_make_up_the_parameters_bit_for_bit(ranks, folder, name, setup):
    found = ranks(holdings, setup.layout.world, attrs.evolve(setup, path=folder(name)))
    want = dict(load(folder(name)).named_parameters())
    said = found[0]["layout"]
    assert set(said.params) == set(want)
    assert said.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if MODELS[name][1] else {})
    for parameter, whole in want.items():
        filled = torch.full_like(whole, torch.nan)
        for rank, answer in enumerate(found):
            held = [(box, tensor) for n, box, tensor in answer["shards"] if n == parameter]
            assert {box for box, _ in held} == set(answer["layout"].held[rank].get(parameter, ()))
            for box, tensor in held:
                filled[box.slices()] = tensor
        assert torch.equal(filled, whole), parameter
        assert all(torch.equal(answer["whole"][parameter], whole) for answer in found)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("name", ["qwen2-deep", "llama-deep"])
def test_the_export_of_an_untrained_model_is_the_folder_bit_for_bit(
    ranks, folder, tmp_path, name, setup
):
    from safetensors.torch import load_file

    ranks(
        export,
        setup.layout.world,
        attrs.evolve(setup, path=folder(name)),
        [],
        str(tmp_path / "out"),
    )
    assert_equal(
        load_file(tmp_path / "out/model.safetensors"),
        load_file(f"{folder(name)}/model.safetensors"),
    )
    assert_equal(
        dict(load(str(tmp_path / "out")).named_parameters()),
        dict(load(folder(name)).named_parameters()),
    )


@pytest.mark.parametrize(
    "setup",
    [
        MEGATRON,
        attrs.evolve(
            MEGATRON, layout=ParallelLayout(tp=2, dp=2), config=MegatronConfig(precision="bf16")
        ),
        ZERO3,
        attrs.evolve(ZERO3, config=DeepSpeedConfig(stage=2)),
        attrs.evolve(
            ZERO3, config=DeepSpeedConfig(stage=3, precision="bf16", persist_elements=1000)
        ),
        attrs.evolve(ZERO3, config=DeepSpeedConfig(stage=2, offload_optimizer=True)),
    ],
    ids=lambda s: f"{s.backend} {s.layout} {s.config.precision} {getattr(s.config, 'stage', '')}",
)
def test_training_from_a_checkpoint_equals_training_on(ranks, folder, tmp_path, setup):
    setup, pairs = attrs.evolve(setup, path=folder("qwen2-deep")), [(make_batch(6), Blend())]
    first = ranks(save_after, setup.layout.world, setup, pairs, 2, str(tmp_path / "c"), 2)
    other = attrs.evolve(setup, model=attrs.evolve(spec_of(setup.path), path=None, init_seed=5))
    second = ranks(load_and_train, setup.layout.world, other, pairs, str(tmp_path / "c"), 2)
    for before, after in zip(first, second, strict=True):
        assert_equal(after["loaded"], before["saved"])
        assert_equal(after["end"], before["end"])
        assert after["version"] == 4


MOVES = {
    "megatron tp2 pp2 to one": (MEGATRON, attrs.evolve(MEGATRON, layout=ParallelLayout())),
    "megatron one to tp2 pp2": (attrs.evolve(MEGATRON, layout=ParallelLayout()), MEGATRON),
    "megatron tp2 pp2 to virtual": (
        MEGATRON,
        attrs.evolve(
            MEGATRON, layout=ParallelLayout(pp=2), config=MegatronConfig(virtual_stages=2)
        ),
    ),
    "zero3 2 to 1": (ZERO3, attrs.evolve(ZERO3, layout=ParallelLayout())),
    "zero3 2 to 4": (ZERO3, attrs.evolve(ZERO3, layout=DP4)),
    "zero3 to zero1": (ZERO3, attrs.evolve(ZERO3, config=DeepSpeedConfig(stage=1))),
    "megatron to zero3": (MEGATRON, ZERO3),
    "zero3 to fsdp": (ZERO3, FSDP),
    "fsdp to megatron": (FSDP, MEGATRON),
}


@pytest.mark.parametrize(("saved", "loaded"), MOVES.values(), ids=MOVES)
def test_a_checkpoint_loads_exactly_in_another_layout_or_backend(
    ranks, folder, tmp_path, saved, loaded
):
    path, pairs = folder("qwen2-deep"), [(make_batch(8), Blend())]
    saved, loaded = attrs.evolve(saved, path=path), attrs.evolve(loaded, path=path)
    first = ranks(save_after, saved.layout.world, saved, pairs, 2, str(tmp_path / "c"), 1)[0]
    for answer in ranks(load_and_train, loaded.layout.world, loaded, pairs, str(tmp_path / "c"), 1):
        assert_equal(answer["loaded"], first["saved"])
        for name, tensor in answer["end"].items():
            torch.testing.assert_close(tensor, first["end"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["policy", "value", "score"])
@pytest.mark.parametrize("setup", [*SETUPS.values(), SEQUENCE_PARALLEL], ids=[*SETUPS, "sequence"])
def test_outputs_stand_at_the_tokens_that_hugging_face_gives_them(ranks, folder, kind, setup):
    path, batch = folder("qwen2-deep", kind), make_batch(9)
    temperature = 1.0 if kind != "policy" else 0.8
    setup = attrs.evolve(
        setup,
        path=path,
        kind=kind,
        optimizer=None,
        micro_batch_tokens=25,
        temperature=temperature,
        generation_tp=1,
    )
    got = ranks(outputs, setup.layout.world, setup, batch)
    model, rows = load(path, kind), []
    for rank in output_ranks(setup.layout):
        answer = got[rank]
        rows += [
            dict(zip(answer, values, strict=True)) for values in zip(*answer.values(), strict=True)
        ]
    assert len(rows) == batch.rows
    with torch.no_grad():
        for row, mine in zip(rows_of(batch), rows, strict=True):
            want = hf_outputs(model, row, kind, temperature)
            for name, value in mine.items():
                renamed = {"topk_ids": "largest_ids", "topk_logprobs": "largest_logprobs"}.get(
                    name, name
                )
                torch.testing.assert_close(value, want[renamed], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("kind", "loss"), [("value", ValueLoss()), ("score", ScoreLoss())], ids=["value", "score"]
)
@pytest.mark.parametrize("setup", [*SETUPS.values(), SEQUENCE_PARALLEL], ids=[*SETUPS, "sequence"])
def test_value_and_score_models_train_as_hugging_face_does(ranks, folder, kind, loss, setup):
    check(ranks, folder, "qwen2-deep", attrs.evolve(setup, kind=kind), loss, steps=2)


@pytest.mark.parametrize("setup", [*SETUPS.values(), SEQUENCE_PARALLEL], ids=[*SETUPS, "sequence"])
def test_splits_and_pieces_change_nothing(ranks, folder, setup):
    """Micro-batches of one row, ranks without rows, logits in pieces, top-k over a vocabulary that is spread."""
    check(
        ranks,
        folder,
        "llama-deep",
        attrs.evolve(setup, micro_batch_tokens=1),
        Blend(),
        rows=5,
        steps=1,
    )
    check(
        ranks,
        folder,
        "qwen2-deep",
        attrs.evolve(setup, micro_batch_tokens=12),
        Blend(),
        rows=1,
        steps=1,
    )
    check(
        ranks,
        folder,
        "llama-deep",
        attrs.evolve(setup, logits_at_once=68 * 5, temperature=0.7),
        TopkLoss(),
        steps=1,
    )


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_loss_whose_weights_are_all_zero_changes_nothing(ranks, folder, setup):

    setup = attrs.evolve(setup, path=folder("llama-deep"))
    got = ranks(train, setup.layout.world, setup, [(make_batch(6), Nothing())])
    assert got[0]["metrics"][0].values()["grad_norm"] == 0.0
    assert_equal(got[0]["parameters"], dict(load(setup.path).named_parameters()))


def test_what_megatron_cannot_build_says_so(ranks, folder):
    def said(**changes) -> str:
        return ranks(
            failing_build, 2, attrs.evolve(MEGATRON, layout=ParallelLayout(tp=2), **changes)
        )[0]

    config = {"model_type": "gpt2", "vocab_size": 68}
    assert "backend megatron builds qwen2" in said(
        model=attrs.evolve(spec_of(folder("llama")), hf_config=config, path=None)
    )
    odd = attrs.evolve(spec_of(folder("llama")), path=None)
    fields = odd.hf_config | {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "head_dim": 16,
    }
    assert "tp 2 must divide" in said(model=attrs.evolve(odd, hf_config=fields))


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_an_unreadable_checkpoint_is_an_error_that_names_it(ranks, folder, tmp_path, setup):
    setup = attrs.evolve(setup, path=folder("llama-deep"))
    for said in ranks(failing_load, setup.layout.world, setup, str(tmp_path / "nothing")):
        assert said.startswith(
            f"DamagedError: the checkpoint {tmp_path / 'nothing'} of role 'actor' "
        )
