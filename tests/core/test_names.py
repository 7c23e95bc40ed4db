"""Near spellings, objects by their path, and modules that are there or not."""

from __future__ import annotations

import collections
import importlib.util
import json
import sys

import pytest

from hybridflow.core.names import (
    did_you_mean,
    import_named,
    import_object,
    is_installed,
    is_path,
    nearest,
    reason,
)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(source)` writes a module `made_for_names`, not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_for_names", raising=False)

    def write(source: str) -> None:
        (tmp_path / "made_for_names.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("made_for_names", None)


def test_the_nearest_name_ignores_case_and_far_ones_are_not_near():
    assert nearest("LR", ["lr", "steps"]) == "lr"
    assert nearest("optimzer", ["Optimizer", "options"]) == "Optimizer"
    assert nearest("zzz", ["lr"]) is None
    assert nearest("x", []) is None


def test_a_near_name_is_asked_for_and_a_far_one_is_not_mentioned():
    assert did_you_mean("optimzer", ["optimizer"]) == "; did you mean 'optimizer'?"
    assert did_you_mean("optimzer", ["optimizer"], quote="`") == "; did you mean `optimizer`?"
    assert did_you_mean("zzz", ["optimizer"]) == ""


@pytest.mark.parametrize("text", ["a:B", "a.b:C", "a.b:C.d"])
def test_a_path_is_a_module_a_colon_and_an_object(text):
    assert is_path(text)


@pytest.mark.parametrize(
    "text", ["a", "a.b", ":C", "a:", "a:b:c", "a..b:C", "a:C.", "a b:C", "a:1", "C:\\x"]
)
def test_what_lacks_a_part_or_has_one_that_is_no_name_is_no_path(text):
    assert not is_path(text)
    with pytest.raises(ValueError, match=r"is not of the form 'package.module:Object'"):
        import_object(text)


def test_an_object_is_found_by_its_path_inside_classes_too():
    assert import_object("collections:OrderedDict") is collections.OrderedDict
    assert import_object("collections:OrderedDict.fromkeys")("ab") == collections.OrderedDict(
        a=None, b=None
    )
    assert import_named("json") is json
    assert import_named("json:loads") is json.loads


def test_an_object_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(ImportError, match="did you mean 'OrderedDict'"):
        import_object("collections:OrderdDict")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_object("no_such_module:X")
    with pytest.raises(ImportError, match=r"json has no 'zzzz'$"):
        import_named("json:zzzz")


def test_a_module_that_exits_is_an_import_error_and_other_failures_are_its_own(module):
    module("import sys\nsys.exit(3)\n")
    for path in ("made_for_names", "made_for_names:X"):
        with pytest.raises(ImportError, match=r"made_for_names.*sys.exit\(3\)"):
            import_named(path)
    module("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        import_named("made_for_names:X")


def test_a_module_is_installed_where_it_would_be_found_and_is_not_imported(module):
    module("raise RuntimeError('imported')")
    assert is_installed("made_for_names")
    assert not is_installed("made_for_names.inner")  # it is no package
    assert "made_for_names" not in sys.modules
    for name in ("json", "json.decoder", "xml.etree.ElementTree", "numpy", "sys"):
        assert is_installed(name) and importlib.util.find_spec(name) is not None
    for name in ("no_such_module", "json.nothing", "no_such_module.inner"):
        assert not is_installed(name)


def test_a_folder_alone_is_no_installed_module_and_a_forbidden_one_is_not_there(
    tmp_path, monkeypatch
):
    (tmp_path / "a_folder_alone").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("a_folder_alone") is not None
    assert not is_installed("a_folder_alone")
    monkeypatch.setitem(sys.modules, "wave", None)
    assert not is_installed("wave")


def test_the_reason_of_an_error_is_one_line():
    assert reason(ValueError("two\n  lines")) == "ValueError: two lines"
    assert reason(KeyError()) == "KeyError"
