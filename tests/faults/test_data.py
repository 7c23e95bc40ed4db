"""Data that cannot be used: said before anything starts, with the row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hybridflow.cli.main import main

GOOD = {"prompt": "1+1=", "answer": "2"}
ODD = {
    "nested": '{"prompt": "1+1=", "answer": "2", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "digits": '{"prompt": "1+1=", "answer": ' + "9" * 5_000 + "}",
}


def refused(capsys, *settings: str) -> str:
    """What is said of a run that does not start; no model was built."""
    assert main(["run", "tiny.toml", "data.source=jsonl", "data.path=rows.jsonl", *settings]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "building" not in said.out
    assert not Path("runs/tiny/checkpoints").exists()
    return said.err


@pytest.mark.parametrize("kind", list(ODD))
def test_f15_json_that_python_cannot_hold_is_an_error_with_its_line(tiny, capsys, kind):
    rows = [json.dumps(GOOD)] * 5 + [ODD[kind]]
    Path("rows.jsonl").write_text("\n".join(rows))
    said = refused(capsys, 'data.prompt="{prompt}"')
    assert "rows.jsonl, line 6: not JSON (" in said and len(said) < 600


@pytest.mark.parametrize("kind", ["nested", "digits", "list"])
def test_f15_a_models_config_that_python_cannot_hold_is_an_error(tiny, capsys, kind):
    Path("model").mkdir()
    Path("model/config.json").write_text(ODD.get(kind, "[1]"))
    Path("model/model.safetensors").touch()
    text = re.sub(r"model\.config = .*", 'model.path = "model"', Path("tiny.toml").read_text())
    Path("tiny.toml").write_text(text)
    assert main(["show", "tiny.toml"]) == 1
    said = capsys.readouterr().err
    assert "actor.model.path" in said and "Traceback" not in said and len(said) < 600
    assert ("holds no fields" if kind == "list" else "is not JSON") in said


@pytest.mark.parametrize("missing", [{"prompt": "1+1="}, {"prompt": "1+1=", "answer": None}])
def test_f15_a_row_without_an_answer_is_found_before_the_start(tiny, capsys, missing):
    """Whether the config names the answer, or the reward looks for it."""
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*[GOOD] * 9, missing]))
    settings = ('data.prompt="{prompt}"', "reward.function=exact_match")
    assert "row 9" in refused(capsys, *settings)
    text = re.sub(r"^answer = .*\n", "", Path("tiny.toml").read_text(), flags=re.M)
    Path("tiny.toml").write_text(text)
    said = refused(capsys, *settings)
    assert "tried on row 9 of train" in said and "no answer to compare with" in said


def test_f15_a_prompt_longer_than_the_context_is_found_before_the_start(tiny, capsys):
    """By the limit of prompts, which the model's positions bound, and for responses that the data have."""
    Path("rows.jsonl").write_text(
        "\n".join(json.dumps(row) for row in [GOOD, {**GOOD, "prompt": "1" * 40}])
    )
    settings = ('data.prompt="{prompt}"', "reward.function=exact_match")
    said = refused(capsys, *settings)
    assert "row 1: the prompt has 41 tokens, more than data.max_prompt_tokens = 8" in said
    said = refused(capsys, *settings, "data.max_prompt_tokens=64")
    assert "exceed the model's 32 positions" in said


def test_f15_a_response_longer_than_the_context_is_found_before_the_start(tiny, capsys):
    Path("rows.jsonl").write_text(
        "\n".join(json.dumps(row) for row in [GOOD, {**GOOD, "answer": "2" * 40}])
    )
    settings = (
        "algorithm={name='sft', batch_size=2}",
        'data.prompt="{prompt}"',
        'data.response="{answer}"',
    )
    text = re.sub(
        r"^algorithm = .*\n|^\[reward\]\n.*\n|^\[sampling\]\n.*\n",
        "",
        Path("tiny.toml").read_text(),
        flags=re.M,
    )
    Path("tiny.toml").write_text(text)
    said = refused(capsys, *settings)
    # Of "1+1=" with a first token, and of 40 digits with a last one.
    assert "row 1: prompt and response have 46 tokens, more than the model's 32 positions" in said
    Path("rows.jsonl").write_text(json.dumps({**GOOD, "answer": "2" * 26}))
    assert (
        main(
            [
                "run",
                "tiny.toml",
                "data.source=jsonl",
                "data.path=rows.jsonl",
                *settings,
                "run.steps=1",
            ]
        )
        == 0
    )
