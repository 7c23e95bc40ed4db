"""The commands around a run, as a user types them."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.kit.recording import SAMPLES, read_rows


@pytest.fixture
def model(sums):
    return str(sums)


def test_evaluate_prints_figures_and_keeps_samples(model, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [
        "evaluate",
        model,
        "--samples",
        "4",
        "--reward",
        "exact_match",
        "--majority",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "sums, step 4" in printed
    figures = json.loads((out / "figures.json").read_text())["figures"]["validation"]
    assert list(figures) == ["greedy", "mean", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert figures["pass@1"]["mean"] == pytest.approx(figures["mean"]["mean"])
    for name in figures:
        assert name in printed
    assert len((out / "validation.jsonl").read_text().splitlines()) == 20 * 5


def test_evaluate_takes_several_files_and_compares(model, tmp_path, capsys):
    # The second one has the name that the first one has in the job.
    for name, numbers in (("easy", range(3)), ("validation", range(5))):
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "evaluate",
        model,
        "validation.data.limit=0",
        "--out",
        str(tmp_path / "out"),
        "--compare",
        model,
    ]
    for name in ("easy", "validation"):
        arguments += ["--data", str(tmp_path / f"{name}.jsonl")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "less sums, step 4, row by row" in printed and "+0.000 to +0.000" in printed
    figures = json.loads((tmp_path / "out/figures.json").read_text())["figures"]
    assert {name: own["greedy"]["rows"] for name, own in figures.items()} == {
        "easy": 3,
        "validation": 5,
    }
    # Each model that it is compared with has a folder of its own.
    assert (tmp_path / "out/compared-sums-step-4/easy.jsonl").is_file()
    other = shutil.copytree(f"{model}/export/actor", tmp_path / "other")
    arguments[arguments.index("--compare") + 1] = str(other)
    assert main(arguments) == 0
    assert (tmp_path / "out/compared-other/easy.jsonl").is_file()


def test_an_evaluation_that_failed_before_its_first_response_keeps_no_folder(
    model, tmp_path, capsys, monkeypatch
):
    (tmp_path / "broken.py").write_text("def score(sample):\n    raise KeyError('unit')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["evaluate", model, "--out", str(tmp_path / "out"), "--reward"]
    assert main([*asked, "broken:score"]) == 1
    assert "raised KeyError: 'unit'" in capsys.readouterr().err
    assert (tmp_path / "out/evaluation.json").is_file()
    assert main([*asked, "exact_match"]) == 0

    # With responses it is an evaluation, which another one does not replace.
    assert main([*asked, "math"]) == 1
    assert "has an evaluation of other settings" in capsys.readouterr().err


def test_recorded_responses_are_scored_again_without_a_model(model, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert main(["evaluate", model, "--samples", "2", "--out", str(out)]) == 0
    before = [json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()]

    # No model is looked for from here on.
    monkeypatch.setattr("hybridflow.inference.models.find_model", None)
    arguments = ["evaluate", str(out), "--rescore", "--reward", "exact_match", "--majority"]
    assert main(arguments) == 0
    again = [
        json.loads(line)
        for line in (out / "rescored-exact_match/validation.jsonl").read_text().splitlines()
    ]
    for old, new in zip(before, again, strict=True):
        right = float(new["response"].strip() == new["meta"]["answer"])
        assert new == {**old, "score": right, "answer": new["response"].strip()}
    figures = json.loads((out / "rescored-exact_match/figures.json").read_text())["figures"][
        "validation"
    ]
    assert list(figures) == ["greedy", "mean", "pass@1", "pass@2", "maj@2"]
    for wrong in (
        ["evaluate", str(tmp_path), "--rescore", "--reward", "exact_match"],
        arguments[:3],
    ):
        assert main(wrong) == 1
    said = capsys.readouterr().err
    assert (
        "is neither the folder of an evaluation" in said and "give the reward that scores" in said
    )


def test_the_recorded_samples_of_a_run_are_scored_again(model, tmp_path, capsys):
    arguments = ["evaluate", model, "--rescore", "--reward", "exact_match", "--out"]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    figures = json.loads((tmp_path / "out/figures.json").read_text())["figures"]
    trained = [row for row in read_rows(Path(model), SAMPLES) if row["data"] == "train"]
    right = [row["response"].strip() == json.loads(row["meta"])["answer"] for row in trained]
    # The mean over groups, which are of one size
    assert trained and figures["train"]["mean"]["mean"] == pytest.approx(sum(right) / len(right))
    assert figures["train"]["mean"]["rows"] == len({row["group"] for row in trained})
    assert any(name.startswith("validation-step-") for name in figures)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--majority"], "give --samples too"),
        (["--samples", "2", "--pass-at", "4"], "--pass-at 4: needs at least as many samples"),
        (["--step", "3"], "is not kept; there is step 2, step 4"),
        (["sampling.max_token=3"], "sampling.max_token"),
    ],
)
def test_evaluate_refuses_before_anything_starts(model, tmp_path, capsys, arguments, said):
    assert main(["evaluate", model, "--out", str(tmp_path / "out"), *arguments]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_by_itself_needs_data_and_a_reward(sums, tmp_path, capsys):
    folder = shutil.copytree(sums / "export/actor", tmp_path / "model")
    assert main(["evaluate", str(folder)]) == 1
    assert "--reward: this model is of no run" in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--reward", "exact_match"]) == 1
    assert "--data: this model is of no run with a held-out set" in capsys.readouterr().err

    file = tmp_path / "sums.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    arguments = ["--reward", "exact_match", "--data", str(file), "--out", str(tmp_path / "out")]
    assert main(["evaluate", str(folder), *arguments]) == 0


def test_generate_writes_a_line_for_each_response(model, tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    arguments = [
        "generate",
        model,
        "--text",
        "1+1=",
        "--text",
        "2+2=",
        "--samples",
        "2",
        "--logprobs",
    ]
    assert main([*arguments, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["1+1=", "1+1=", "2+2=", "2+2="]
    assert all(len(line["logprobs"]) == len(line["response_ids"]) for line in lines)

    # From a file, greedy, printed: the samples are equal.
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "1+1="}) + "\n")  # the run's data have answers
    capsys.readouterr()
    assert main(["generate", model, "--prompts", str(file), "--samples", "2", "--greedy"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == second


@pytest.mark.parametrize("arguments", [[], ["--text", "1+1=", "--prompts", "x.jsonl"]])
def test_generate_needs_prompts(model, capsys, arguments):
    assert main(["generate", model, *arguments]) == 1
    assert "either --text or --prompts FILE" in capsys.readouterr().err


def test_chat_answers_line_after_line(model, capsys, monkeypatch):
    lines = "12+34=\n\n/system 1\n/what\nhello\n12+34=\n/quit\n1+1=\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", model, "--greedy"]) == 0
    printed = capsys.readouterr()
    first, unspelled, second = printed.out.splitlines()
    assert first == second and unspelled == ""
    assert "sums, step 4: each line is a prompt by itself" in printed.err
    assert "is told nothing first" in printed.err and "/reset forgets" in printed.err
    assert "hybridflow: " in printed.err


def test_export_writes_a_folder(model, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", model, "--step", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"sums, step 2: {out} (float32)\n")
    assert main(["export", model, "--out", str(out)]) == 1
    assert "is not empty; give a folder that is new" in capsys.readouterr().err


def test_adapters_have_one_dtype(model, tmp_path, capsys):
    asked = ["export", model, "--out", str(tmp_path / "out"), "--adapter"]
    assert main([*asked, "--dtype", "bfloat16"]) == 1
    assert "adapters are written in float32" in capsys.readouterr().err
    assert main(asked) == 1
    assert "has no adapters" in capsys.readouterr().err


def test_a_text_that_is_put_into_a_template_is_told(model, capsys):
    assert main(["generate", model, "--text", "1+1", "data.prompt={question}="]) == 0
    printed = capsys.readouterr()
    assert "each text is put into data.prompt, '{question}='" in printed.err
    assert json.loads(printed.out)["prompt"] == "1+1="
