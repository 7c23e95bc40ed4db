"""What a plugin says of its packages for `hybridflow doctor`."""

from __future__ import annotations

import re
import time

import pytest
import torch

from hybridflow.kit import diagnosis
from hybridflow.kit.diagnosis import has_gpu, import_row, installed, tries


def test_installed_packages_have_their_versions_and_others_are_left_out():
    versions = installed(["torch", "no-such-package"])
    assert list(versions) == ["torch"]
    build = str(torch.__version__)  # with a local part on some builds: 2.13.0+cpu
    assert versions["torch"].partition("+")[0] == build.partition("+")[0]


def test_a_gpu_is_one_that_torch_can_use():
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError):
        assert not has_gpu()
    else:
        assert has_gpu()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pass", None),
        ("raise ValueError('no port')", "ValueError: no port"),
        ("import sys; sys.exit('first\\nlast\\n')", "last"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_code_is_tried_in_an_interpreter_of_its_own(code, said):
    seconds, error = tries(code)
    assert error == said and 0 < seconds < 60


def test_it_gets_the_environment_beside_ours(monkeypatch):
    monkeypatch.setenv("OURS", "1")
    code = "import os; assert os.environ['OURS'] + os.environ['THEIRS'] == '12'"
    assert tries(code, {"THEIRS": "2"})[1] is None
    assert "THEIRS" in (tries(code)[1] or "")


def test_what_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(diagnosis, "TIMEOUT_S", 0.3)
    started = time.monotonic()
    assert tries("import time; time.sleep(60)") == (0.3, "no answer within 0 s")
    assert time.monotonic() - started < 30


def test_an_import_that_fails_comes_with_what_to_type():
    title, state, remedy = import_row("colorsys", None, "pip install it")
    assert (title, remedy) == ("import colorsys", "")
    assert re.fullmatch(r"works \(\d+ s\)", state)
    what, found, remedy = import_row("no_such_module", None, "pip install it")
    assert (what, remedy) == ("import no_such_module", "pip install it")
    assert found == "fails: ModuleNotFoundError: No module named 'no_such_module'"
