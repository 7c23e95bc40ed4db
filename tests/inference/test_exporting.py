"""Exports: the run's own weights, a tokenizer beside them, and a card that gives nothing away."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelConfig
from hybridflow.inference.exporting import export, export_adapter
from hybridflow.inference.models import find_model
from hybridflow.kit.huggingface.loading import build_hf_model
from hybridflow.kit.testing.runs import TABLES
from hybridflow.settle.models import resolve_model


def test_a_checkpoint_s_export_is_the_run_s_own(sums, tmp_path):
    # The last step is both exported by the run and kept as a checkpoint.
    found = find_model(str(sums))
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


def test_adapters_alone_are_those_of_the_run_s_end(adapted, tmp_path):
    run = shutil.copytree(adapted, tmp_path / "adapted")
    export_adapter(find_model(str(run)), tmp_path / "end", tmp_path / "logs")
    own = run / "export/actor/adapter"
    assert load_file(own / "adapter_model.safetensors")
    same_adapter(tmp_path / "end", own)

    # The same of the checkpoint of that step, and others of an earlier one.
    (run / "done.json").unlink()
    last = find_model(str(run))
    assert last.checkpoint is not None and last.step == 4
    export_adapter(last, tmp_path / "last", tmp_path / "logs")
    same_adapter(tmp_path / "last", own)
    export_adapter(find_model(str(run), step=2), tmp_path / "earlier", tmp_path / "logs")
    with pytest.raises(AssertionError):
        same_adapter(tmp_path / "earlier", own)
    assert "after step 2" in (tmp_path / "earlier/README.md").read_text()

    # peft puts them on the model that training began with, and it computes what the merged one does.
    ids = torch.tensor([[1, 5, 7, 2]])
    merged = AutoModelForCausalLM.from_pretrained(run / "export/actor")
    frozen = tmp_path / "base"
    base = resolve_model(ModelConfig(config=TABLES["actor"]["model"]["config"]), "policy", "actor")
    build_hf_model(base, torch.float32)[0].save_pretrained(frozen)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(frozen), str(tmp_path / "last")
    )
    torch.testing.assert_close(model(ids).logits, merged(ids).logits)


def same_adapter(one, other):
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (one, other)]
    for config in configs:
        config["target_modules"].sort()  # a set
    assert configs[0] == configs[1]


def test_a_model_whose_weights_were_trained_has_no_adapters(sums, tmp_path):
    for step in (None, 2):
        with pytest.raises(ModelError, match=r"has no adapters: .*leave out --adapter"):
            export_adapter(find_model(str(sums), step=step), tmp_path / "out", tmp_path / "logs")
    assert not (tmp_path / "out").exists()
