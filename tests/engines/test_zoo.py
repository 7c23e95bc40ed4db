"""A part of the zoo (`make zoo` runs all of it): some architectures with an engine, and every one asked of vLLM's loader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import EVERY, matrix
from helpers.zoo import ENGINES, ZOO
from helpers.zoo_cells import TESTS, check_cells, write_model
from safetensors.torch import load_file

from hybridflow.core.names import is_installed

THREE = ("phi3", "gemma3", "glm4_moe")
"""Fused on disk; sliding windows and norms with +1; experts with a buffer. Tied and odd: two ranks of qwen2."""
UNTRACED = {
    "bloom": "Cannot copy out of meta tensor",  # vLLM reads ALiBi's slopes
    "gpt_oss": "No Unquantized MoE backend supports the deployment",
    "llama-3kv": "AssertionError",  # three heads on two ranks
    "phi": "vLLM takes no lm_head.bias",
}
"""Architecture -> how vLLM refuses it with tp 2, where a CPU is its platform."""


ONCE = pytest.mark.skipif(is_installed("vllm") and not EVERY, reason="make test has it")


# The first, since what vLLM finds out of an architecture here it need not find out again.
@pytest.mark.timeout(300)
def test_vllms_loader_takes_all_of_every_architecture_on_two_ranks(tmp_path):
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-m", "helpers.zoo_traced"], cwd=TESTS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("traced ")]
    found = {said.pop("name"): said for said in map(json.loads, (line[7:] for line in lines))}
    assert found.keys() == ZOO.keys()
    for name, said in found.items():
        if name in UNTRACED:
            assert UNTRACED[name] in said["error"]
            continue
        assert "error" not in said, (name, said["error"])
        assert said["opaque"] == {}, name
        assert said["shapes"] == on_disk(name, tmp_path), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=ONCE if name == "transformers" else matrix) for name in ENGINES],
)
def test_engine_and_trainer_speak_as_hugging_face_after_each_of_two_syncs(engine):
    check_cells(THREE, engine, 1)


@matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_do_so_too(engine):
    check_cells(("qwen2",), engine, 2)


def on_disk(name: str, folder: Path) -> dict[str, list[int]]:
    """Shapes as transformers writes them."""
    files = load_file(write_model(name, 1, folder / name) / "model.safetensors")
    return {parameter: list(values.shape) for parameter, values in files.items()}
