"""The file of a report: one page with all in it, that asks for nothing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

import pytest
from helpers.paths import ROOT
from helpers.recorded import made_run

from hybridflow.core.errors import ConfigError
from hybridflow.report.building import write_report


def data_of(text: str) -> dict:
    [packed] = re.findall(r'<script id="data" type="text/plain">([^<]*)</script>', text)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_a_report_is_one_file_that_has_all_of_its_data(tmp_path):
    made_run(tmp_path / "a")
    file = write_report([tmp_path / "a"], tmp_path / "out/report.html")
    text = file.read_text()
    assert data_of(text)["runs"][0]["step"] == 40
    assert "__" + "DATA__" not in text and "uPlot" in text
    # Nothing is fetched: no address in any attribute, and a policy that forbids it.
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "default-src 'none'" in text
    assert (tmp_path / "a/trace.json.gz").is_file()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


def test_a_name_cannot_become_part_of_the_page(tmp_path):
    made_run(tmp_path / "<script>alert(1)", rows=[], spans=[])
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text


def test_the_state_may_be_given_and_a_file_that_cannot_be_written_is_told(tmp_path):
    made_run(tmp_path / "a", done=False, rows=[], spans=[])
    text = write_report([tmp_path / "a"], tmp_path / "r.html", "finished").read_text()
    assert data_of(text)["runs"][0]["state"] == "finished"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([tmp_path / "a"], tmp_path / "file/r.html")


def test_what_is_not_ours_is_as_its_authors_published_it():
    folder = ROOT / "report/vendor"
    sums = dict(re.findall(r"\| `([\w.]+)` \| `(\w{64})` \|", (folder / "README.md").read_text()))
    files = {path.name for path in folder.iterdir()} - {"README.md", "uPlot.LICENSE"}
    assert set(sums) == files
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    assert "MIT" in (folder / "uPlot.LICENSE").read_text()
    assert sum((folder / name).stat().st_size for name in files) < 1_500_000
