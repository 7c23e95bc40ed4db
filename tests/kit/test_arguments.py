"""Settings for a library: the names that it has are read from its source."""

from __future__ import annotations

import email
import sys

import attrs
import pytest

from hybridflow.kit.arguments import annotated_fields, known_arguments, package_folder


def test_the_folder_of_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "unheard_of").mkdir()
    (tmp_path / "unheard_of/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("unheard_of") == tmp_path / "unheard_of"
    assert "unheard_of" not in sys.modules
    assert [str(package_folder("email"))] == email.__path__


def test_a_module_that_is_no_package_and_one_that_is_not_there_have_no_folder():
    assert package_folder("colorsys") is None
    assert package_folder("no_such_library") is None


SOURCE = """
import dataclasses

OUTSIDE: int = 1

@dataclasses.dataclass
class Engine:
    model: str
    seed: int = 0
    plain = 3
    other.thing: int = 4
    def method(self):
        inside: int = 5

class Server:
    port: int = 80
    seed: int = 1
"""


def test_annotated_names_of_the_classes_are_read_in_order(tmp_path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(SOURCE)
    second.write_text("class Engine:\n    extra: int\n")
    assert annotated_fields([first]) == ("model", "seed", "port")
    assert annotated_fields([first], ["Server"]) == ("port", "seed")
    files = [first, second, tmp_path / "missing.py"]
    assert annotated_fields(files, ["Engine"]) == ("model", "seed", "extra")


def config_class(there: tuple[str, ...]) -> type:
    check = known_arguments("Library 1.0", lambda: there, frozenset({"model"}))

    @attrs.frozen
    class Config:
        arguments: dict = attrs.field(factory=dict, validator=check)

    return Config


def test_an_argument_that_is_not_there_is_told_with_the_nearest_name():
    config = config_class(("model", "seed", "max_batch"))
    assert config({"seed": 3, "max_batch": 4}).arguments == {"seed": 3, "max_batch": 4}
    said = r"arguments: the installed Library 1.0 has no argument 'max_bacth'.*max_batch"
    with pytest.raises(ValueError, match=said):
        config({"seed": 3, "max_bacth": 4})


def test_an_argument_that_follows_from_the_rest_is_refused():
    said = "arguments: model follows from the rest of the config; remove it"
    for there in (("model", "seed"), ()):
        with pytest.raises(ValueError, match=said):
            config_class(there)({"model": "mine"})


def test_without_the_library_any_other_name_passes():
    assert config_class(())({"anything": 1}).arguments == {"anything": 1}
