"""What is wrong with a model, or between it and what runs it, is said before anything starts."""

from __future__ import annotations

import json

import pytest

from hybridflow.cli.main import main


def shown(capsys, *settings: str) -> tuple[int, str]:
    """(status, what is printed) of `hybridflow show tiny.toml` with these settings."""
    capsys.readouterr()
    status = main(["show", "tiny.toml", *settings])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("hiden_size=32", "actor: model.config.hiden_size is no field of a qwen2 config; did you"),
        ("hidden_size=wide", "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ("num_attention_heads=0", "actor: model.config.num_attention_heads is 0; give at least 1"),
        ("rms_norm_eps=nan", "actor: model.config.rms_norm_eps is nan; give a finite number"),
        ("hidden_act=silk", "actor: model.config.hidden_act is 'silk'; did you mean 'silu'?"),
        ("model_type=qwen9", "actor: model.config.model_type is 'qwen9', which transformers does"),
        ("num_key_value_heads=3", "actor: a qwen2 model of these sizes cannot be built"),
    ],
)
def test_f12_a_config_is_built_and_compared_before_anything_starts(tiny, capsys, setting, said):
    status, printed = shown(capsys, f"actor.model.config.{setting}")
    assert status == 1
    assert said in printed and "Traceback" not in printed
    assert main(["run", "tiny.toml", f"actor.model.config.{setting}"]) == 1
    assert not (tiny / "runs").exists()


def test_f12_a_folder_of_an_unknown_type_is_no_model(tiny, capsys):
    folder = tiny / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen9", "vocab_size": 16}))
    (folder / "model.safetensors").touch()
    text = (tiny / "tiny.toml").read_text().splitlines()
    lines = [line for line in text if "model.config" not in line]
    (tiny / "tiny.toml").write_text("\n".join(lines))
    status, printed = shown(capsys, "actor.model.path=folder")
    assert status == 1 and "Traceback" not in printed
    assert "model_type is 'qwen9', which transformers does not know" in printed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["rollout.fast=true", "actor.model.config.model_type=olmo2"], "the fast decoder cannot run"),
        (
            ["runtime=ray", "pools.main=[4]", "actor.layout.tp=4"],
            "tp 4 must divide the model's num_key_value_heads 2; choose a smaller layout.tp",
        ),
        (
            ["runtime=ray", "pools.main=[2]", "actor.generation.tp=2", "rollout.fast=false"],
            "only the fast decoder has tensor parallelism",
        ),
        (["actor.backend.lora={target_modules=['qproj']}"], "no linear layer of the model is named"),
    ],
)  # fmt: skip
def test_f12_what_the_kinds_cannot_do_together_is_said_from_the_config(
    tiny, capsys, settings, said
):
    status, printed = shown(capsys, *settings)
    assert status == 1 and "Traceback" not in printed
    assert said in printed
