"""A torchvision whose operators do not load can be imported, and the environment's own sitecustomize is still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.installed import UNDECLARED, stand_in

from hybridflow.backends.sglang.shims import FOLDER

SHIM = FOLDER / "vision"
META = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets.new_empty(0, dtype=torch.long)
"""
"""What torchvision does at its import, which fails where its operators are not loaded."""


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """In an interpreter that finds these folders first, and nothing of the environment's own files for starts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_an_operator_is_declared_before_torchvision_says_how_it_behaves(tmp_path):
    stand_in(
        tmp_path,
        "torchvision",
        files={"torchvision/_meta_registrations.py": META, "torchvision/__init__.py": ""},
    )
    code = (
        UNDECLARED
        + "import torchvision._meta_registrations, torch; print(torch.ops.torchvision.nms)"
    )
    without = python(code, tmp_path)
    assert without.returncode != 0 and "torchvision::nms" in without.stderr
    done = python(code, SHIM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torchvision.nms"


def test_the_sitecustomize_that_it_hides_is_run_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.said = 'the other one'\n")
    done = python("print(said)", SHIM, tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("the other one", "")
    assert python("print('alone')", SHIM).stdout.strip() == "alone"
