"""What others' plugins meet in a run, and how errors arrive from workers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import attrs
import pytest
import torch
from helpers.paths import ROOT
from safetensors.torch import load_file, save_file

from hybridflow.backends.fsdp import plugin as fsdp_plugin
from hybridflow.cli.main import main
from hybridflow.core.plugins import registry

FILES = re.compile(r"^<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export/actor/model.safetensors")


def test_f18_a_backend_that_follows_the_docs_saves_and_resumes(tiny, monkeypatch, capsys):
    page = (ROOT / "docs/writing-a-backend.md").read_text()
    for name, text in FILES.findall(page):
        Path(name).write_text(text)
    modules = set(sys.modules)
    monkeypatch.setattr(registry(), "_registered", dict(registry()._registered))
    import plain_plugin  # type: ignore[import-not-found]

    for descriptor in plain_plugin.hybridflow_plugins():
        registry().add(descriptor)
    plain = ["actor.backend=plain", "rollout=plain", "run.checkpoint_every=1"]
    try:
        assert main(["run", "tiny.toml", "run.steps=3", "run.name=whole", *plain]) == 0
        assert main(["run", "tiny.toml", "run.steps=2", *plain]) == 0
        assert main(["run", "tiny.toml", "run.steps=3", *plain, "--resume"]) == 0
    finally:
        for name in set(sys.modules) - modules:
            if name.startswith("plain_"):
                del sys.modules[name]
    assert "Traceback" not in capsys.readouterr().err
    whole, resumed = exported(Path("runs/whole")), exported(Path("runs/tiny"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole) and whole


def model_folder() -> dict:
    """Write the model of tiny.toml as a folder `model`; return its config."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 16,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(64)}, "model/model.safetensors")
    text = re.sub(r"model\.config = .*", 'model.path = "model"', Path("tiny.toml").read_text())
    Path("tiny.toml").write_text(text)
    return config


FAILS = """
from hybridflow.backends.fsdp.backend import FSDPBackend


class Fails(FSDPBackend):
    def build(self):
        return {}["missing"]
"""


def test_f16_an_error_of_ours_from_a_worker_is_its_sentence_alone(tiny, capsys):
    model_folder()
    assert main(["run", "tiny.toml"]) == 1
    said = capsys.readouterr()
    [told] = [line for line in said.err.splitlines() if "which this qwen2 needs" in line]
    assert told.startswith("hybridflow: model has no ")
    assert "Traceback" not in said.err + said.out and 'File "' not in said.err + said.out


def test_an_error_that_is_not_ours_has_the_workers_traceback(tiny, monkeypatch, capsys):
    Path("failing.py").write_text(FAILS)
    monkeypatch.setattr(registry(), "_registered", dict(registry()._registered))
    [fsdp] = fsdp_plugin.hybridflow_plugins()
    registry().add(attrs.evolve(fsdp, name="fails", factory="failing:Fails"))
    assert main(["run", "tiny.toml", "actor.backend=fails"]) == 1
    sys.modules.pop("failing", None)
    said = capsys.readouterr().err
    assert "KeyError: 'missing'" in said and 'return {}["missing"]' in said


CODE = """
import pathlib

pathlib.Path(__file__).with_name("canary").touch()
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


class Config(PretrainedConfig):
    model_type = "theirs"


class Model(PreTrainedModel):
    pass


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


class Unpickled:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("model_type", ["qwen2", "theirs"])
def test_code_in_a_models_folder_is_never_run(tiny, model_type, capsys):
    """Neither by the model's config, nor by the tokenizer's, nor from pickled weights."""
    config = model_folder()
    theirs = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    config |= {"model_type": model_type, "auto_map": theirs}
    folder = Path("model")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(CODE)
    tokenizer = {
        "tokenizer_class": "Tokenizer",
        "auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    torch.save(
        {"model.norm.weight": Unpickled((folder / "canary").absolute())},
        folder / "pytorch_model.bin",
    )
    for command in ("show", "run"):
        main([command, "tiny.toml"])
        main([command, "tiny.toml", "tokenizer={path='model'}"])
    (folder / "model.safetensors").unlink()
    assert main(["run", "tiny.toml"]) == 1
    assert "no *.safetensors weights" in capsys.readouterr().err
    assert not list(Path().rglob("canary"))
    # The traps work where somebody runs them.
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (folder / "canary").exists()
