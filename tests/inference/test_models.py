"""Which model a path means, and what is said where there is none."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from hybridflow.core.errors import ModelError
from hybridflow.core.values.sealed import read_sealed, write_sealed
from hybridflow.inference.models import find_model


def test_a_run_is_its_exported_model(sums):
    found = find_model(str(sums))
    assert (found.label, found.step, found.run) == ("sums, step 4", 4, sums)
    assert found.model == {"path": str(sums / "export/actor")} and found.checkpoint is None
    assert found.tokenizer == found.model["path"]
    assert find_model(str(sums / "export/actor")) == found
    assert find_model(str(sums), step=4) == found


def test_a_step_is_its_checkpoint(sums):
    found = find_model(str(sums), step=2)
    assert found.label == "sums, step 2"
    assert found.checkpoint == sums / "checkpoints/step-00000002/actor"
    assert found.model["config"]["model_type"] == "qwen2"
    assert found.tokenizer == str(sums / "tokenizer")


def test_a_step_that_is_not_kept_names_those_that_are(sums):
    with pytest.raises(ModelError, match=r"step 3 .*there is step 2, step 4"):
        find_model(str(sums), step=3)


def test_without_an_export_it_is_the_newest_checkpoint(sums, tmp_path):
    run = shutil.copytree(sums, tmp_path / "sums")
    shutil.rmtree(run / "export")
    assert find_model(str(run)).checkpoint == run / "checkpoints/step-00000004/actor"
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ModelError, match="a model of role 'actor' is not kept; there is none"):
        find_model(str(run))


def test_an_export_of_before_the_run_went_on_does_not_count(sums, tmp_path):
    run = shutil.copytree(sums, tmp_path / "sums")
    write_sealed(run / "done.json", {"step": 9, "validations": {}, "exported": False})
    assert find_model(str(run)).step == 4 and find_model(str(run)).checkpoint is not None
    (run / "done.json").unlink()  # it goes on, and was killed
    assert find_model(str(run)).checkpoint is not None


def test_a_value_model_generates_nothing(sums, tmp_path):
    run = shutil.copytree(sums, tmp_path / "sums")
    shutil.copytree(run / "export/actor", run / "export/critic")
    config = json.loads((run / "export/critic/config.json").read_text())
    config["architectures"] = ["Qwen2ForSequenceClassification"]
    (run / "export/critic/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="role 'critic' is a value or score model"):
        find_model(str(run), role="critic")


def test_a_tokenizer_that_was_trained_and_is_not_saved_is_missed(sums, tmp_path):
    run = shutil.copytree(sums, tmp_path / "sums")
    mark = read_sealed(run / "run.json")
    mark["config"]["tokenizer"] = {"train": "char"}
    write_sealed(run / "run.json", mark)
    assert find_model(str(run), step=2).tokenizer == str(run / "tokenizer")
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(ModelError, match=r"was trained on the run's data.*run.export=true"):
        find_model(str(run), step=2)


def test_modules_beside_the_run_s_config_are_found(sums, tmp_path, monkeypatch):
    run = shutil.copytree(sums, tmp_path / "sums")
    (tmp_path / "exp").mkdir()
    mark = read_sealed(run / "run.json")
    write_sealed(run / "run.json", mark | {"beside": str(tmp_path / "exp")})
    monkeypatch.setattr(sys, "path", list(sys.path))
    find_model(str(run))
    assert str(tmp_path / "exp") in sys.path


def test_a_folder_by_itself_says_where_texts_end(sums, tmp_path):
    folder = shutil.copytree(sums / "export/actor", tmp_path / "model")
    fields = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({**fields, "eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20})
    )
    found = find_model(str(folder))
    assert (found.label, found.run, found.tables) == ("model", None, {})
    assert found.stop_tokens == [2, 7]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 8]}))
    assert found.stop_tokens == [2, 7]
    generation = (folder / "generation_config.json").rename(tmp_path / "generation_config.json")
    assert found.stop_tokens == [2, 8]
    generation.rename(folder / "generation_config.json")
    assert found.sampling == {"temperature": 0.6, "top_k": 20}
    assert found.positions == 32
    with pytest.raises(ModelError, match="--step 2 is of a run"):
        find_model(str(folder), step=2)


def test_stages_are_folders_of_a_folder(sums, tmp_path):
    for at, name in enumerate(("warm-up", "grpo")):
        run = shutil.copytree(sums, tmp_path / "demo" / name)
        mark = read_sealed(run / "run.json")
        write_sealed(run / "run.json", mark | {"number": at})
    demo = str(tmp_path / "demo")
    assert find_model(demo).run == tmp_path / "demo/grpo"
    assert find_model(demo, stage="warm-up").run == tmp_path / "demo/warm-up"
    with pytest.raises(ModelError, match=r"no stage 'rl' \(stages: grpo, warm-up\)"):
        find_model(demo, stage="rl")


def test_the_model_of_an_earlier_stage_is_found(sums, tmp_path):
    shutil.copytree(sums, tmp_path / "demo/warm-up")
    run = shutil.copytree(sums, tmp_path / "demo/grpo")
    mark = read_sealed(run / "run.json")
    mark["config"]["actor"]["model"] = {"path": "stage:warm-up"}
    write_sealed(run / "run.json", mark)
    found = find_model(str(run), step=2)
    assert found.model == {"path": str(tmp_path / "demo/warm-up/export/actor")}


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no such folder"):
        find_model(str(tmp_path / "none"))
    (tmp_path / "notes").mkdir()
    with pytest.raises(ModelError, match=r"neither a run .* nor a model .*; it has notes"):
        find_model(str(tmp_path))
