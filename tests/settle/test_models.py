"""A role's model: read from its folder, or taken as it is given; what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import BASE, MODEL, STAGES
from helpers.jobs import jobs, model_folder, problem

from hybridflow.core.errors import ModelError
from hybridflow.core.values.model import ModelConfig, ModelSpec
from hybridflow.core.values.sealed import write_sealed
from hybridflow.settle.models import exported, model_path, resolve_model, with_exports


def test_a_model_is_the_fields_of_its_folder_or_those_that_are_given(tmp_path):
    folder = model_folder(tmp_path / "model", hidden_size=8)
    fields = {"model_type": "qwen2", "vocab_size": 16, "hidden_size": 8}
    read = resolve_model(ModelConfig(path=str(folder), init_seed=3), "value", "critic")
    assert read == ModelSpec(fields, str(folder), 3, "value")
    given = resolve_model(ModelConfig(config=fields), "policy", "actor")
    assert given == ModelSpec(fields, None, 0, "policy")


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path):
    folder = model_folder(tmp_path / "model")
    config = ModelConfig(path=str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"actor\.model\.path: .*has no \*\.safetensors weights"):
        resolve_model(config, "policy", "actor")
    assert resolve_model(config, "policy", "actor", weights=False).vocab_size == 16
    (folder / "config.json").write_text("{'model_type'}")
    with pytest.raises(ModelError, match=r"config\.json is not JSON: "):
        resolve_model(config, "policy", "actor", weights=False)
    with pytest.raises(ModelError, match=r"needs model_type, the name of the architecture"):
        resolve_model(ModelConfig(config={"vocab_size": 16}), "policy", "actor")


def test_a_missing_model_folder_and_one_without_a_config_are_named(tmp_path):
    text = BASE.replace(f"actor.model.config = {MODEL}", "")
    assert "needs exactly one of `path`" in problem(text=text)
    assert "there is no folder 'nowhere'" in problem("actor.model.path=nowhere", text=text)
    (tmp_path / "empty").mkdir()
    assert "has no config.json (it has nothing)" in problem("actor.model.path=empty", text=text)
    assert "got both" in problem("actor.model.path=empty")


def test_a_stage_starts_from_the_export_once_it_is_there():
    second = jobs(text=STAGES)[1]
    folder = Path("runs/tiny/first/export/actor")
    assert second.models["actor"].spec.model.export == str(folder)
    with pytest.raises(ModelError, match="there is no folder"):
        with_exports(second)
    model_folder(folder, vocab_size=99)
    bound = with_exports(second)
    assert bound.models["actor"].spec.model.path == str(folder)
    assert bound.models["actor"].spec.model.vocab_size == 99


def test_a_model_of_no_earlier_stage_stays_as_it_is_and_an_export_keeps_kind_and_seed(tmp_path):
    own = ModelSpec({"model_type": "qwen2"}, None, 1)
    assert exported(own, "actor") is own
    folder = str(model_folder(tmp_path / "export", vocab_size=20))
    read = exported(ModelSpec({"vocab_size": 16}, None, 5, "value", export=folder), "critic")
    assert (read.path, read.export) == (folder, folder)
    assert (read.init_seed, read.kind, read.vocab_size) == (5, "value", 20)


def finished(folder: Path, *roles: str, exports: bool = True) -> Path:
    """The folder of a run that trained these roles."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    write_sealed(folder / "done.json", {"exported": bool(exports)})
    for role in roles:
        model_folder(folder / "export" / role)
    return folder


def test_a_finished_run_means_what_it_exported(tmp_path):
    run = finished(tmp_path / "sums", "actor", "critic")
    for role, expected in (("actor", "actor"), ("critic", "critic"), ("ref", "actor")):
        assert model_path(str(run), role) == str(run / "export" / expected)
    judged = finished(tmp_path / "judged", "reward")
    assert model_path(str(judged), "cost") == str(judged / "export/reward")
    spec = resolve_model(ModelConfig(path=str(run)), "policy", "ref")
    assert spec.path == str(run / "export/actor")
    # A model's own folder, and one that is not there, stay what they are.
    assert model_path(str(run / "export/actor"), "critic") == str(run / "export/actor")
    assert model_path("nowhere", "actor") == "nowhere"


def test_a_run_without_an_export_says_how_to_get_one(tmp_path):
    run = finished(tmp_path / "sums", "actor", exports=False)  # of an earlier end: it went on since
    with pytest.raises(ModelError, match=rf"has exported no model .* export {run} --out FOLDER"):
        resolve_model(ModelConfig(path=str(run)), "policy", "actor")
    (run / "done.json").unlink()
    with pytest.raises(ModelError, match="has exported no model"):
        resolve_model(ModelConfig(path=str(run)), "policy", "actor")
    stages = finished(tmp_path / "demo/grpo", "actor").parent
    with pytest.raises(ModelError, match=rf"a run with stages; give one of them: {stages}/grpo"):
        resolve_model(ModelConfig(path=str(stages)), "policy", "actor")
