"""`hybridflow new`: the package that it writes, and names that it refuses."""

from __future__ import annotations

import ast
import tomllib

import pytest

from hybridflow.cli.main import main
from hybridflow.cli.new.command import KINDS, new_package
from hybridflow.core.errors import ConfigError
from hybridflow.core.plugins import KINDS as EVERY_KIND


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_a_module_a_test_and_an_entry_point(kind, tmp_path):
    written = new_package(kind, "my_own", tmp_path)
    folder = tmp_path / "hybridflow-my-own"
    places = [str(path.relative_to(folder)) for path in written]
    assert places == ["pyproject.toml", "src/my_own.py", "tests/test_my_own.py"]
    assert kind in EVERY_KIND
    project = tomllib.loads(written[0].read_text())
    assert project["project"]["name"] == "hybridflow-my-own"
    assert project["project"]["entry-points"]["hybridflow"] == {f"{kind}.my_own": "my_own:MyOwn"}
    module, test = (ast.parse(path.read_text()) for path in written[1:])
    assert "MyOwn" in {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    named = [node.name for node in test.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert any(name.startswith(("test_", "Test")) for name in named)
    assert all("$" not in path.read_text() for path in written)


def test_the_command_writes_into_the_current_folder_and_says_how_to_go_on(
    tmp_path, monkeypatch, capsys, path
):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "tracker", "mine"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        "wrote hybridflow-mine/pyproject.toml",
        "wrote hybridflow-mine/src/mine.py",
        "wrote hybridflow-mine/tests/test_mine.py",
    ]
    assert "cd hybridflow-mine" in said
    assert 'pip install -e .      # then: run.trackers = ["mine"]' in said
    assert (tmp_path / "hybridflow-mine" / "src" / "mine.py").is_file()


def test_a_new_algorithm_and_its_test_have_under_fifty_lines(tmp_path):
    _, *written = new_package("algorithm", "mine", tmp_path)
    assert sum(len(path.read_text().splitlines()) for path in written) < 50


@pytest.mark.parametrize("name", ["My-Algo", "class", "1st", "", "a.b", "../up", "Ä"])
def test_a_name_that_no_module_has_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="must be a module's name"):
        new_package("algorithm", name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "hybridflow-there").mkdir()
    with pytest.raises(ConfigError, match="is there already; choose another name, or remove it"):
        new_package("algorithm", "there", tmp_path)
    assert not list((tmp_path / "hybridflow-there").iterdir())


def test_a_kind_that_has_no_template_is_refused(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["new", "planner", "mine"])
    assert ended.value.code == 2 and "invalid choice: 'planner'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
