"""`hybridflow serve`, as a user types it, with a client of OpenAI's beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import openai
import pytest

from hybridflow.cli.main import main

SERVE = [sys.executable, "-m", "hybridflow.cli.main", "serve"]


@pytest.mark.timeout(120)
def test_a_model_is_served_until_it_is_interrupted(sums, tmp_path, capfd):
    asked = [
        *SERVE,
        str(sums),
        "--port",
        "0",
        "--plain",
        "--tools",
        "none",
        "sampling.temperature=0",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        head = server.stdout.readline()
        lines = [server.stdout.readline().removeprefix("export ").strip() for _ in range(4)]
        found = dict(line.split("=", 1) for line in lines)
        client = openai.OpenAI(base_url=found["OPENAI_BASE_URL"], api_key=found["OPENAI_API_KEY"])
        said = [{"role": "user", "content": "12+3="}]
        made = client.chat.completions.create(model="any", messages=said, max_tokens=4)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=found["OPENAI_BASE_URL"], api_key="sk-no").models.list()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
    assert (
        head
        == f"sums, step 4 at {found['ANTHROPIC_BASE_URL']}, until Ctrl-C; for a program's shell:\n"
    )
    assert server.returncode == 0 and errors.endswith("1 answers\n")

    # As `hybridflow generate` has it.
    out = tmp_path / "out.jsonl"
    arguments = ["generate", str(sums), "--text", "12+3=", "--greedy", "--plain", "--out", str(out)]
    assert main([*arguments, "sampling.max_tokens=4", "data.bos=false"]) == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert made.choices[0].message.content == row["response"]


def test_what_cannot_be_served_is_told_before_an_engine_starts(sums, capfd):
    assert main(["serve", str(sums), "--port", "0"]) == 1
    assert "or give --plain" in capfd.readouterr().err
    assert main(["serve", str(sums), "--plain", "--tools", "xml"]) == 1
    assert "give one of hermes, json, none" in capfd.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(sums), "--plain", "--port", port]) == 1
    assert f"port {port} cannot be served: Address already in use" in capfd.readouterr().err
