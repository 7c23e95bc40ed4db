"""The page of a run that goes on: newer data when there are some, for this machine alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from helpers.recorded import made_run, metrics_of

from hybridflow.report.serving import PageServer


def fetched(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode()


def test_newer_data_are_served_when_the_run_has_written_some(tmp_path):
    run = made_run(tmp_path / "a", done=False, rows=[], spans=[])
    with PageServer([tmp_path]) as server:
        assert server.address.startswith("http://127.0.0.1:")
        assert "DecompressionStream" in fetched(server.address)
        first = json.loads(fetched(server.address + "data.json"))
        assert first["runs"][0]["step"] == 40 and first["live"] == "data.json"
        assert json.loads(fetched(server.address + "data.json")) == first  # not read again
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_of(41)) + "\n")
        assert json.loads(fetched(server.address + "data.json"))["runs"][0]["step"] == 41
    with pytest.raises(urllib.error.URLError):
        fetched(server.address)


@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("", {"Host": "evil.example"}, 403),
        ("data.json", {"Host": "evil.example:80"}, 403),
        ("run.json", {}, 404),
        ("../a/run.json", {}, 404),
        ("/", {}, 404),
        ("/data.json", {}, 404),
        ("/wrong/data.json", {}, 404),
    ],
)
def test_other_hosts_other_files_and_other_keys_are_refused(tmp_path, path, headers, status):
    made_run(tmp_path / "a", rows=[], spans=[])
    with PageServer([tmp_path]) as server, pytest.raises(urllib.error.HTTPError) as refused:
        root = f"http://127.0.0.1:{server.port}"
        fetched(root + path if path.startswith("/") else server.address + path, **headers)
    assert refused.value.code == status


def test_a_run_that_is_gone_is_told(tmp_path):
    run = made_run(tmp_path / "a", rows=[], spans=[])
    with PageServer([run]) as server:
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(server.address)
    assert refused.value.code == 503


def test_a_port_that_is_taken_is_an_error(tmp_path):
    made_run(tmp_path / "a", rows=[], spans=[])
    with PageServer([tmp_path]) as server, pytest.raises(OSError):
        PageServer([tmp_path], server.port)
