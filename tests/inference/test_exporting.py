"""Exports: the run's own weights, a tokenizer beside them, and a card that gives nothing away."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.inference.exporting import export
from hybridflow.inference.models import find_model


def test_a_checkpoint_s_export_is_the_run_s_own(sums, tmp_path):
    # The last step is both exported by the run and kept as a checkpoint.
    found = find_model(str(sums))
    import shutil

    run = shutil.copytree(sums, tmp_path / "sums")
    shutil.rmtree(run / "export")
    last = find_model(str(run))
    assert last.checkpoint is not None and last.step == found.step
    assert export(last, tmp_path / "out", "auto", tmp_path / "logs") == "float32"

    own = sums / "export/actor"
    expected = load_file(own / "model.safetensors")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        first, second = (
            json.loads((folder / name).read_text()) for folder in (own, tmp_path / "out")
        )
        assert first == second, name

    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("12+34=", return_tensors="pt").input_ids
    logits = [
        AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (own, tmp_path / "out")
    ]
    assert torch.equal(*logits)


def test_another_dtype(sums, tmp_path):
    assert (
        export(find_model(str(sums)), tmp_path / "out", "bfloat16", tmp_path / "logs") == "bfloat16"
    )
    written = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_the_card_says_how_it_was_made_and_names_no_place(sums, tmp_path):
    export(find_model(str(sums), step=2), tmp_path / "out", "auto", tmp_path / "logs")
    card = (tmp_path / "out/README.md").read_text()
    assert "# sums, step 2" in card and "algorithm\n`grpo`" in card.replace(
        "the algorithm `", "the algorithm\n`"
    )
    score = json.loads((sums / "done.json").read_text())["validations"]["2"]["validation/score"]
    assert f"| validation/score | {score:.4g} |" in card
    assert "| algorithm.group_size | `4` |" in card
    assert "| torch | " in card
    assert (
        "/" not in card.replace("validation/", "").replace("1/", "") or str(sums.parent) not in card
    )
