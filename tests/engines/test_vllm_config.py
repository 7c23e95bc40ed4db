"""Arguments of the installed vLLM are checked by their names, without importing it."""

import subprocess
import sys

import pytest

pytest.importorskip("vllm.version")

from helpers.tiny import GRPO

from hybridflow.backends.vllm.config import OURS, VLLMConfig, argument_names
from hybridflow.core.errors import ConfigError
from hybridflow.core.launch import load_config


def test_an_argument_that_this_vllm_has_passes_and_others_name_the_nearest():
    assert VLLMConfig(engine_args={"block_size": 32}).engine_args == {"block_size": 32}
    with pytest.raises(ValueError, match=r"no argument 'block_sise'; did you mean 'block_size'\?"):
        VLLMConfig(engine_args={"block_sise": 32})


def test_what_follows_from_the_config_is_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size follows from the rest"):
        VLLMConfig(engine_args={"tensor_parallel_size": 2})
    assert set(argument_names()) >= OURS


def test_numbers_that_cannot_be_are_refused():
    for wrong in ({"max_sequences": 0}, {"gpu_memory": 1.5}, {"kv_memory_gb": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            VLLMConfig(**wrong)


def test_reading_the_names_imports_no_engine():
    code = "from hybridflow.backends.vllm.config import argument_names; argument_names()\n"
    code += "import sys; print('vllm.engine' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


def test_weights_that_cannot_be_compared_are_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(GRPO.replace('"rewards:digits"', '"exact_match"'))
    load_config("tiny.toml", ["rollout=vllm"])
    with pytest.raises(ConfigError, match=r"actor\.sync\.verify: the engine vllm gives no view"):
        load_config("tiny.toml", ["rollout=vllm", "actor.sync.verify=true"])
