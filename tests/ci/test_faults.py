"""Every patch that puts a fault back applies, and names a test that is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("ci_faults", ROOT / "ci/faults.py")
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)
PATCHES = sorted(faults.PATCHES.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_a_fault_can_be_put_back(patch):
    assert faults.applies(patch), f"{patch} is to be written anew: what it changes has changed"
    file, *options = faults.test_of(patch)
    text = (ROOT / file.partition("::")[0]).read_text()
    assert options[0] == "-k" and f"{options[1]}" in text


def test_a_patch_that_does_not_fit_is_told(tmp_path):
    text = PATCHES[0].read_text().replace("\n-", "\n-something else")
    (tmp_path / "f0.patch").write_text(text)
    assert not faults.applies(tmp_path / "f0.patch")


def test_faults_are_chosen_by_number_and_by_name_and_one_without_a_patch_is_refused(
    monkeypatch, capsys
):
    monkeypatch.setattr(faults, "notices", lambda patch: "fails")

    def chosen(*names: str) -> int:
        monkeypatch.setattr("sys.argv", ["faults.py", *names])
        with pytest.raises(SystemExit) as ended:
            faults.main()
        return ended.value.code

    assert chosen("f24-start", "f3") == 0
    said = capsys.readouterr().out.split("\n")
    assert said == ["f3-flipped: fails", "f3-older: fails", "f24-start: fails", ""]
    assert chosen("f3", "f99") == 2 and "there is no patch of f99" in capsys.readouterr().err
