"""What the documentation shows has run. Marks before a fenced block of docs/*.md, CONTRIBUTING.md or README.md:

`<!-- run -->` Python, run in order with the page's other such blocks; what it prints must be as its comments say:
`print(x)  # text`. `<!-- file: NAME -->` is written to the folder in which they run. `<!-- source: PATH -->` must stand
in that file of the repository as it is here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.paths import ROOT

from hybridflow.core.plugins import registry
from hybridflow.settle.launch import load_config

BLOCK = re.compile(r"^<!-- (run|file|source)(?:: (\S+))? -->\n```\w*\n(.*?)^```$", re.M | re.S)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.M)
PAGES = {
    p.relative_to(ROOT).as_posix(): BLOCK.findall(p.read_text())
    for p in [*sorted(ROOT.glob("docs/*.md")), *ROOT.glob("*.md")]
}


def write_files(page: str, folder: Path) -> None:
    for mark, name, text in PAGES[page]:
        if mark == "file":
            (folder / name).write_text(text)


@pytest.mark.parametrize(
    "page", [p for p, blocks in PAGES.items() if any(mark == "run" for mark, *_ in blocks)]
)
def test_snippets_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(page, tmp_path)
    namespace = {"__name__": "page"}
    try:
        for mark, _, text in PAGES[page]:
            if mark == "run":
                capsys.readouterr()
                exec(compile(text, page, "exec"), namespace)
                if expected := PRINTED.findall(text):
                    assert capsys.readouterr().out.splitlines() == expected
    finally:
        registry.cache_clear()  # a page may register plugins
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


def test_the_algorithm_of_the_readme_takes_the_place_of_the_demos(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    [code] = [text for mark, _, text in PAGES["README.md"] if "class MyGRPO" in text]
    (tmp_path / "mine.py").write_text(code)
    assert "stages.grpo.algorithm.name=mine:MyGRPO" in (ROOT / "README.md").read_text()
    try:
        _, grpo = load_config(
            ROOT / "examples/arithmetic.toml", ["stages.grpo.algorithm.name=mine:MyGRPO"]
        )
    finally:
        sys.modules.pop("mine", None)
    assert grpo.algorithm_name == "mine:MyGRPO" and grpo.algorithm.config.group_size == 8


@pytest.mark.parametrize(
    "page", [p for p, blocks in PAGES.items() if any(mark == "source" for mark, *_ in blocks)]
)
def test_quoted_source_is_the_source(page):
    for mark, path, text in PAGES[page]:
        if mark == "source":
            code = (ROOT / path).read_text()
            quoted = {textwrap.indent(text.rstrip("\n"), " " * depth) for depth in (0, 4, 8, 12)}
            assert any(q in code for q in quoted), (
                f"{page} quotes what {path} does not say:\n{text}"
            )


def test_the_backend_and_the_engine_of_the_page_pass_the_kit(tmp_path):
    page = "docs/writing-a-backend.md"
    write_files(page, tmp_path)
    asked = "not distributed and not of_hugging_face and not split and not again"  # the slow half; all of it passes
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        asked,
        "test_plain.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
