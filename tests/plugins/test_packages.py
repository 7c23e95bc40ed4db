"""What `hybridflow new` writes, and the package in examples/plugins: installed apart, listed, run with their own tests."""

from __future__ import annotations

import shutil

import pytest
from helpers.packages import hybridflow, install, python
from helpers.paths import ROOT

TINY = (
    "run.steps=1", "runtime=inline", "validation.data.limit=8",
    "stages.warm-up.actor.model.config.hidden_size=32", "stages.warm-up.actor.model.config.num_hidden_layers=1",
    "stages.warm-up.actor.model.config.intermediate_size=48", "stages.warm-up.run.steps=1",
    "stages.grpo.algorithm.prompts_per_step=4", "stages.grpo.algorithm.group_size=4",
)  # fmt: skip


LOADS = """
from hybridflow.core.plugins import registry
print(registry().get("{kind}", "my_own"))
"""
KINDS = (
    "algorithm",
    "training_backend",
    "rollout_engine",
    "reward",
    "environment",
    "tracker",
    "command",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_its_tests_untouched_and_is_listed(kind, tmp_path):
    made = hybridflow(None, tmp_path, "new", kind, "my_own")
    assert made.returncode == 0, made.stderr
    package = tmp_path / "hybridflow-my-own"
    tested = python(None, package, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0 and " passed" in tested.stdout, tested.stdout
    packages = install(package, tmp_path / "site")
    # From the folder that has the package's folder in it
    listed = hybridflow(packages, tmp_path, "plugins", kind).stdout
    assert "my_own" in listed and "hybridflow-my-own" in listed
    loaded = python(packages, tmp_path, "-c", LOADS.format(kind=kind))
    assert loaded.returncode == 0 and "MyOwn" in loaded.stdout, loaded.stderr


def test_gigpo_is_a_package_that_needs_nothing_from_us(tmp_path):
    source = ROOT / "examples" / "plugins" / "hybridflow-gigpo"
    packages = install(source, tmp_path / "site")
    listed = hybridflow(packages, tmp_path, "plugins", "algorithm").stdout
    assert "gigpo" in listed and "hybridflow-gigpo" in listed
    tests = shutil.copytree(source, tmp_path / "tests", ignore=lambda *_: {"hybridflow_gigpo.py"})
    tested = python(packages, tests, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0 and " passed" in tested.stdout, tested.stdout
    folder = f"run.folder={tmp_path / 'runs'}"
    run = hybridflow(
        packages,
        ROOT,
        "run",
        "examples/calculator_tool.toml",
        *TINY,
        folder,
        "stages.grpo.algorithm.name=gigpo",
    )
    assert (
        run.returncode == 0
        and "grpo: gigpo on" in run.stdout
        and "held-out environment" in run.stdout
    ), run.stderr
