"""docs/conformance.md and docs/writing-an-algorithm.md: their algorithm and tests run as they are.

(test_snippets.py runs the pages' other snippets.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import DOCS, matrix

FILES = re.compile(r"^<!-- file: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)


def write(page: str, folder: Path) -> dict[str, str]:
    files = dict(FILES.findall((DOCS / page).read_text()))
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@matrix
def test_the_algorithm_runs_from_the_command_line_by_its_path(tmp_path):
    files = write("writing-an-algorithm.md", tmp_path)
    assert 20 <= len([line for line in files["my_file.py"].splitlines() if line.strip()]) <= 40
    assert "step 3/3" in run(tmp_path, "-m", "hybridflow.cli.main", "run", "my_run.toml")


@pytest.mark.parametrize(
    ("page", "test", "passed"),
    [("writing-an-algorithm.md", "test_my_file.py", 15), ("conformance.md", "test_length.py", 4)],
)
def test_the_tests_of_the_page_pass(page, test, passed, tmp_path):
    write(page, tmp_path)
    assert f"{passed} passed" in run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)


def test_the_page_names_every_class_and_flag_of_the_kit():
    from hybridflow.kit import testing

    page = (DOCS / "conformance.md").read_text()
    for name in testing.__all__:
        if name not in ("Reference", "tiny_config"):
            assert f"`{name}" in page, f"docs/conformance.md does not name {name}"
        found = getattr(testing, name)
        if not name.endswith("Conformance"):
            continue
        own = {f: v for base in found.__mro__[:-1] for f, v in vars(base).items() if f[0] != "_"}
        kinds = (bool, int, float, tuple, dict, type(None))
        for flag in [f for f, v in own.items() if isinstance(v, kinds)]:
            assert f"`{flag}`" in page, f"docs/conformance.md does not name {name}.{flag}"
