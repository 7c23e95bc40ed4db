"""`hybridflow report`."""

from __future__ import annotations

import webbrowser

from helpers.recorded import made_run

from hybridflow.cli.main import main


def test_the_page_of_one_folder_lies_in_it_and_that_of_several_here(tmp_path, monkeypatch, capsys):
    made_run(tmp_path / "runs/a", rows=[], spans=[])
    made_run(tmp_path / "runs/b", rows=[], spans=[])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["report", "../runs/a"]) == 0
    assert (tmp_path / "runs/a/report.html").is_file()
    assert main(["report", "../runs"]) == 0
    assert (tmp_path / "runs/report.html").is_file()
    assert main(["report", "../runs/a", "../runs/b"]) == 0
    assert (tmp_path / "here/report.html").is_file()
    assert "../runs/a/report.html: 0.1 MB" in capsys.readouterr().out.splitlines()

    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["report", "../runs/a", "--out", "x.html", "--open"]) == 0
    assert opened == [(tmp_path / "here/x.html").as_uri()]


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
