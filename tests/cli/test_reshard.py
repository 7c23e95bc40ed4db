"""`hybridflow reshard`."""

from __future__ import annotations

import json
import re

import pytest
from helpers.installed import needs

from hybridflow.cli.main import main


def rows(text):
    found = {}
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) == 4 and cells[1][0].isdigit():
            found[cells[0].split(",")[0]] = cells[1:]
    return found


def test_it_prints_the_papers_table_the_groups_and_who_talks(capsys):
    sides = ["--from", "backend=megatron,tp=4,dp=2", "--to", "tp=2"]
    assert main(["reshard", *sides, "--model", "llama-7b"]) == 0
    text = capsys.readouterr().out
    assert "llama-7b: 6.74 billion parameters, 13.48 GB in bfloat16" in text
    assert (
        "generation tp groups  [0,2] [1,3] [4,6] [5,7]" in text
        and "micro-dp groups       [0,1] [2,3] [4,5] [6,7]" in text
    )
    assert "rank 0 receives from 1" in text
    table = rows(text)
    assert table["gather over everything"][1] == "13.48 GB" and table["planned"][1] == "6.74 GB"
    assert float(table["planned"][0].split()[0]) == pytest.approx(13.48 / 4, rel=0.01)


def test_it_reads_a_models_config_and_shows_every_rank(capsys, tmp_path):
    fields = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 101, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arguments = [
        "--from",
        "backend=fsdp,dp=4",
        "--to",
        "tp=2",
        "--model",
        str(tmp_path),
        "--dtype",
        "float32",
        "--ranks",
    ]
    assert main(["reshard", *arguments]) == 0
    text = capsys.readouterr().out
    assert "from fsdp dp4 (4 ranks" in text and "transfers of 26 parameters" in text
    assert len(re.findall(r"^[0-3]  ", text, re.M)) == 4


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("tp=4,db=2", "tp=2", "'db' is neither a size nor a setting of training_backend 'fsdp'"),
        ("tp=4,dp", "tp=2", "'dp' is no key=value"),
        ("tp=four", "tp=2", "--from: tp is 'four'"),
        ("tp=4", "tp=0", "--to: tp is '0'"),
        ("tp=4", "tp=3", "do not divide the 4 ranks"),
        ("pp=2", "tp=2", "backend fsdp has no pp 2; its axes are dp, tp"),
        ("tp=2,cp=2", "tp=2", "backend fsdp has no cp 2"),
        ("dp=4", "pp=2,engine=sglang", "engine sglang has no pp; leave it out"),
        ("dp=4,backend=ddp", "tp=2", "unknown training_backend 'ddp'"),
        ("dp=4,replicas=two", "tp=2", "--from.replicas: expected an integer"),
        ("dp=4", "tp=2,engine=vlm", "unknown rollout_engine 'vlm'; did you mean 'vllm'?"),
        ("dp=4,order=tp-dp", "tp=2", "order must name each"),
        ("backend=megatron,pp=5", "tp=1", "32 layers do not divide into 5 stages"),
        ("backend=megatron,tp=3", "tp=1", "attention heads 32"),
    ],
)
def test_what_cannot_be_is_said(source, target, said, capsys):
    assert main(["reshard", "--from", source, "--to", target, "--model", "llama-7b"]) == 1
    assert said in capsys.readouterr().err


def test_an_unknown_model_names_the_known_ones(capsys):
    assert main(["reshard", "--from", "tp=2", "--to", "tp=1", "--model", "gpt-5"]) == 1
    assert "llama-70b" in capsys.readouterr().err


FIELDS = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 97, "max_position_embeddings": 128,
          "tie_word_embeddings": True}  # fmt: skip
TO_VLLM = ["reshard", "--from", "backend=fsdp,dp=4", "--to", "tp=2", "--engine", "vllm"]


@needs("vllm")
def test_vllms_own_loader_is_asked_also_for_a_model_that_no_formula_knows(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    assert main([*TO_VLLM, "--model", str(config)]) == 0
    asked = capsys.readouterr().out
    assert "what vllm takes: by its own loader" in asked
    assert main([*TO_VLLM, "--model", str(config), "--formula"]) == 0
    formula = capsys.readouterr().out
    assert "what vllm takes: by the formula, as --formula asks" in formula
    assert rows(asked)["planned"][0] == rows(formula)["planned"][0]

    config.write_text(json.dumps({**FIELDS, "model_type": "gemma2", "head_dim": 32}))
    assert main([*TO_VLLM, "--model", str(config)]) == 0
    assert "what vllm takes: by its own loader" in capsys.readouterr().out
    assert main([*TO_VLLM, "--model", str(config), "--formula"]) != 0
    assert "gemma2" in capsys.readouterr().err


def test_the_output_says_why_a_formula_served(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    monkeypatch.setattr("hybridflow.backends.vllm.config.package_folder", lambda name: None)
    assert main([*TO_VLLM, "--model", str(tmp_path)]) == 0
    assert "what vllm takes: by the formula; vLLM is not installed" in capsys.readouterr().out
    assert main([*TO_VLLM, "--model", "llama-7b"]) == 0
    assert "llama-7b is a shape without a config.json" in capsys.readouterr().out
