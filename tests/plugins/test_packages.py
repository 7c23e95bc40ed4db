"""What `hybridflow new` writes, and the package in examples/plugins: installed apart, listed, run with their own tests."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from helpers.packages import hybridflow, install, python
from helpers.paths import ROOT, matrix

from hybridflow.cli.main import main

TINY = (
    "run.steps=1", "runtime=inline", "validation.data.limit=8",
    "stages.warm-up.actor.model.config.hidden_size=32", "stages.warm-up.actor.model.config.num_hidden_layers=1",
    "stages.warm-up.actor.model.config.intermediate_size=48", "stages.warm-up.run.steps=1",
    "stages.grpo.algorithm.prompts_per_step=4", "stages.grpo.algorithm.group_size=4",
)  # fmt: skip


LOADS = """
from hybridflow.core.plugins import registry
for kind in {kinds}:
    print(registry().get(kind, "my_" + kind))
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


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> list[Path]:
    """The folder of a new package of each kind, called my_KIND."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in KINDS:
            assert main(["new", kind, f"my_{kind}"]) == 0
    return [folder / f"hybridflow-my-{kind.replace('_', '-')}" for kind in KINDS]


def test_a_new_package_passes_its_tests_where_it_was_written(written):
    package = written[KINDS.index("reward")]
    tested = python(None, package, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0 and " passed" in tested.stdout, tested.stdout


@matrix
def test_a_new_package_of_each_kind_is_installed_and_listed_and_passes_its_tests(written, tmp_path):
    packages = install(tmp_path / "site", *written)
    # From the folder that has the packages' folders in it
    listed = hybridflow(packages, written[0].parent, "plugins").stdout
    loaded = python(packages, tmp_path, "-c", LOADS.format(kinds=KINDS))
    assert loaded.returncode == 0, loaded.stderr
    tested = python(
        packages, tmp_path, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull,
        *(str(package / "tests") for package in written),
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    for kind, package in zip(KINDS, written, strict=True):
        assert re.search(rf"{kind} +my_{kind} +{package.name} +0\.1 +ready", listed), listed
        name = "".join(word.capitalize() for word in f"my_{kind}".split("_"))
        assert f"my_{kind}.{name}" in loaded.stdout
        assert re.search(rf"test_my_{kind}\.py::.* PASSED", tested.stdout), tested.stdout


PACKAGES = {
    "gigpo": ("examples/calculator_tool.toml", "stages.grpo.algorithm.name=gigpo", *TINY),
    "metis": (
        "examples/plugins/hybridflow-metis/mixed.toml", "run.steps=1", "validation.data.limit=8", "validation.every=1",
        "stages.warm-up.actor.model.config.num_hidden_layers=1", "stages.warm-up.run.steps=1",
    ),
}  # fmt: skip
"""Algorithm -> the arguments of a run of it."""


@matrix
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_is_a_package_that_needs_nothing_from_us(name, tmp_path):
    source = ROOT / "examples" / "plugins" / f"hybridflow-{name}"
    packages = install(tmp_path / "site", source)
    listed = hybridflow(packages, tmp_path, "plugins", "algorithm").stdout
    assert name in listed and source.name in listed
    tests = shutil.copytree(source, tmp_path / "tests", ignore=lambda *_: {f"hybridflow_{name}.py"})
    tested = python(packages, tests, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0 and " passed" in tested.stdout, tested.stdout
    folder = f"run.folder={tmp_path / 'runs'}"
    run = hybridflow(packages, ROOT, "run", *PACKAGES[name], folder)
    assert run.returncode == 0 and f": {name} on" in run.stdout, run.stderr
    assert "held-out" in run.stdout
