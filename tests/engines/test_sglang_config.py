"""Arguments of the installed SGLang are checked by name, without importing it; shims vanish where none are needed."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sglang.version")

from helpers.tiny import GRPO

from hybridflow.backends.sglang import shims
from hybridflow.backends.sglang.config import OURS, SGLangConfig, argument_names
from hybridflow.backends.sglang.diagnosis import diagnose
from hybridflow.core.errors import ConfigError
from hybridflow.core.launch import load_config


def test_an_argument_that_this_sglang_has_passes_and_others_name_the_nearest():
    assert SGLangConfig(engine_args={"chunked_prefill_size": 512}).engine_args == {"chunked_prefill_size": 512}
    with pytest.raises(ValueError, match=r"no argument 'chunked_prefil_size'; did you mean 'chunked_prefill_size'\?"):
        SGLangConfig(engine_args={"chunked_prefil_size": 512})


def test_what_follows_from_the_config_is_refused():
    with pytest.raises(ValueError, match="tp_size follows from the rest"):
        SGLangConfig(engine_args={"tp_size": 2})
    assert set(argument_names()) >= OURS


def test_numbers_that_cannot_be_are_refused():
    for wrong in ({"max_sequences": 0}, {"gpu_memory": 1.5}, {"kv_tokens": -1}, {"bucket_mb": 0}, {"restarts": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SGLangConfig(**wrong)


def test_reading_the_names_imports_no_engine():
    code = "from hybridflow.backends.sglang.config import argument_names; argument_names()\n"
    code += "import sys; print(any(m.startswith('sglang.srt') for m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


def test_weights_that_cannot_be_compared_are_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(GRPO.replace('"rewards:digits"', '"exact_match"'))
    load_config("tiny.toml", ["rollout=sglang"])
    with pytest.raises(ConfigError, match=r"actor\.sync\.verify: the engine sglang gives no view"):
        load_config("tiny.toml", ["rollout=sglang", "actor.sync.verify=true"])


def test_shims_are_for_cpus_and_the_kernel_stand_in_for_those_without_the_real_one(monkeypatch):
    cuda, cpu = shims.variables(torch.device("cuda")), shims.variables(torch.device("cpu"))
    assert "PYTHONPATH" not in cuda and "SGLANG_USE_CPU_ENGINE" not in cuda
    assert str(shims.FOLDER / "vision") in cpu["PYTHONPATH"]
    monkeypatch.setattr(shims, "find_spec", lambda name: object())
    assert str(shims.FOLDER / "kernel") not in shims.variables(torch.device("cpu"))["PYTHONPATH"]
    monkeypatch.setattr(shims, "find_spec", lambda name: None)
    assert str(shims.FOLDER / "kernel") in shims.variables(torch.device("cpu"))["PYTHONPATH"]


WITHOUT_OURS = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__module__', '') != '_hybridflow_cpu']\n"
)
"""The test environment has a declaration of its own for torchvision, since vLLM lives in the same process as we."""


@pytest.mark.parametrize(
    ("shim", "code"),
    [("kernel", "import sglang.srt.entrypoints.engine"), ("vision", WITHOUT_OURS + "import torchvision")],
)
def test_each_shim_is_still_needed(shim, code):
    """If the second half fails the packages have changed, and the shim can go."""
    environment = {**os.environ, **shims.variables(torch.device("cpu"))}
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p != str(shims.FOLDER / shim))
    without = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert without.returncode != 0 and ("sgl_kernel" if shim == "kernel" else "torchvision::nms") in without.stderr


def test_the_doctor_says_that_it_can_be_imported():
    rows = {what: (found, todo) for what, found, todo in diagnose()}
    assert rows["package"][0].startswith("sglang 0.5.") and rows["import sglang"][0].startswith("works")
