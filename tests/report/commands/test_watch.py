"""`hybridflow watch`, on a run that is under way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers.recorded import made_run
from helpers.tiny import write

from hybridflow.cli.main import main
from hybridflow.report.serving import PageServer

COMMAND = (sys.executable, "-m", "hybridflow.cli.main")


def test_a_run_is_watched_while_it_goes_on(tmp_path):
    write(tmp_path)
    run = subprocess.Popen(
        [*COMMAND, "run", "tiny.toml", "run.steps=5000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    watch = None
    try:
        for line in run.stdout:
            if " step " in line:
                break
        watch = subprocess.Popen(
            [*COMMAND, "watch", "runs"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        address, _, note = watch.stdout.readline().partition(" ")  # it has a key
        assert note == "(Ctrl-C ends it)\n"

        def now() -> dict:
            with urllib.request.urlopen(f"{address}data.json") as answer:
                [found] = json.load(answer)["runs"]
            return found

        first = now()
        assert first["state"] == "running" and first["metrics"]["step"]
        deadline = time.monotonic() + 60
        while now()["step"] <= first["step"] and time.monotonic() < deadline:
            time.sleep(0.2)
        assert now()["step"] > first["step"]
        watch.send_signal(signal.SIGINT)
        assert watch.communicate(timeout=30)[0] == ""  # in a pipe there are no bars
        assert watch.returncode == 0
    finally:
        for process in filter(None, (watch, run)):
            process.kill()
            process.communicate()


def test_a_terminal_has_a_bar_for_each_run(tmp_path, monkeypatch):
    for name in ("a", "b"):
        made_run(tmp_path / name, rows=[], spans=[])
    pid, terminal = os.forkpty()
    if not pid:  # pragma: no cover
        os.environ.update(NO_COLOR="1", TERM="xterm", COLUMNS="150")
        os.execv(sys.executable, [*COMMAND, "watch", str(tmp_path)])
    said = b""
    deadline = time.monotonic() + 60
    try:
        while said.count(b"40 of 40, finished") < 2 and time.monotonic() < deadline:
            said += os.read(terminal, 4096)
    finally:
        os.kill(pid, signal.SIGINT)
        while True:  # what is still to be read would keep it
            try:
                if not os.read(terminal, 4096):
                    break
            except OSError:
                break
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(terminal)
    assert said.count(b"40 of 40, finished") >= 2
    assert b"\x1b[3" not in said  # no colour where none is wanted


@pytest.mark.parametrize("port", ["70000", None])
def test_a_port_that_cannot_be_had_is_refused(tmp_path, capsys, port):
    made_run(tmp_path / "a", rows=[], spans=[])
    with PageServer([tmp_path]) as server:
        asked = port or str(server.port)
        assert main(["watch", str(tmp_path), "--port", asked]) == 1
    assert f"--port {asked}: cannot be listened on" in capsys.readouterr().err
