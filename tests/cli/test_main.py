"""The command: what it takes, what it prints, how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from helpers.paths import ROOT

from hybridflow.cli.main import main

CONFIG = str(ROOT / "examples/arithmetic.toml")


def helped(capsys, *arguments: str) -> str:
    """What --help prints."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_show_prints_and_ends_with_0(capsys, path):
    assert main(["show", CONFIG, "runtime=inline"]) == 0
    assert "stage warm-up" in capsys.readouterr().out


def test_overrides_may_stand_on_both_sides_of_an_option(capsys, path):
    assert main(["show", CONFIG, "runtime=inline", "--docs", "run.seed=77"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"run\.seed +77 +command line", out) and "# Softmax temperature" in out


def test_problems_go_to_stderr_and_the_command_ends_with_1(capsys, path):
    assert main(["show", CONFIG, "runtime=inline", "run.stepz=1", "sampling.top_q=1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "hybridflow: the configuration has 2 problems:" in captured.err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", CONFIG, "--run.steps=3"], "overrides have no dashes: run.steps=3"),
        (["show", CONFIG, "--resume"], "unknown argument --resume"),
        (["plugins", "reward", "more"], "unknown argument more"),
        ([], "COMMAND"),
    ],
)
def test_arguments_that_it_does_not_take_end_with_2(arguments, said, capsys, path):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_current_folder_is_searched_last(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    sys.path[:] = [p for p in sys.path if p not in ("", str(tmp_path))]
    main(["plugins", "tracker"])
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def test_a_reader_that_stops_reading_is_no_error():
    piped = f"{sys.executable} -m hybridflow.cli.main plugins --capabilities | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("kind")


def test_every_command_has_its_place_in_the_docs(capsys, path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = (ROOT / "docs/commands.md").read_text()
    options = page + (ROOT / "docs/models.md").read_text()
    names = re.findall(r"^    (\w+) ", helped(capsys), re.MULTILINE)
    assert {"run", "show", "plugins", "doctor"} <= set(names)
    for name in names:
        assert f"## hybridflow {name}" in page, name
        for option in re.findall(r"(--[a-z-]+)", helped(capsys, name)):
            assert option == "--help" or option in options, (name, option)


def test_the_version_is_the_packages(capsys, path):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ended.value.code == 0 and capsys.readouterr().out == f"hybridflow {project['version']}\n"


def test_an_unknown_command_is_told_with_one_like_it(capsys, path):
    with pytest.raises(SystemExit) as ended:
        main(["plugin"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "unknown command 'plugin'; did you mean 'plugins'?" in said
