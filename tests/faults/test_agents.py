"""Twenty agents, most of which misbehave: the others' episodes go on, and none of them gets at another's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from helpers.episodes import request, speaking
from helpers.sources import char

from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.kit.chat.conversation import MOST_WAITING

DIGITS = char()
ROWS = 20
KINDS = ("works", "dies", "hangs", "floods", "disobeys", "guesses", "comes_late")
LIMIT_S = 8.0
"""Time limit of an answer, and by far enough for an agent that does something."""
keys: dict[str, tuple[str, str]] = {}
"""Row -> the address and key of its episode, for an agent that comes late to another's."""
told: dict[str, object] = {}


def canary(row) -> str:
    """A text that only one episode has, of characters that the tokenizer knows."""
    return f"90{int(row['name']):02d}09"


def post(url: str, key: str, body: bytes, path: str = "chat/completions") -> tuple[int, bytes]:
    asked = urllib.request.Request(f"{url}/{path}", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def question(row, text: str = "+") -> bytes:
    messages = [{"role": "user", "content": canary(row) + text}]
    return json.dumps({"messages": messages, "max_tokens": 2}).encode()


def works(model, row):
    assert post(model.url, model.key, question(row))[0] == 200


def dies(model, row):
    """The agent's process is killed while the model answers it."""
    works(model, row)
    code = "import time, sys; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    if process.returncode:
        raise ChildProcessError(f"the agent's process ended with status {process.returncode}")


def hangs(model, row):
    works(model, row)
    time.sleep(LIMIT_S + 4)


FLOOD = f"""
import json, os, threading, urllib.error, urllib.request
found = []
def ask():
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        asked = urllib.request.Request(url, os.environ["BODY"].encode(), headers)
        found.append(urllib.request.urlopen(asked).status)
    except urllib.error.HTTPError as error:
        found.append(error.code)
threads = [threading.Thread(target=ask) for _ in range({MOST_WAITING + 60})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(found))
"""


def floods(model, row):
    """Bad requests, and more questions at once than may wait."""
    for _ in range(40):
        assert post(model.url, "sk-none", b"{}")[0] == 401
        assert post(model.url, model.key, b"\0" * 1000)[0] == 400
    variables = {**os.environ, **model.variables, "BODY": question(row).decode()}
    made = subprocess.run(
        [sys.executable, "-c", FLOOD], env=variables, capture_output=True, text=True, check=True
    )
    told["flood"] = json.loads(made.stdout)


def disobeys(model, row):
    for path, body in (
        ("chat/completions", b"[]"),
        ("chat/completions", b'{"messages": [{"role": 7}]}'),
        ("chat/completions", b'{"messages": "' + canary(row).encode() + b'"}'),
        ("responses", b'{"input": [{"type": "computer_call"}]}'),
        ("messages", b'{"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}'),
        ("chat/completions", b'{"messages": [{"role": "user", "content": {"a": 1}}]}'),
    ):
        assert post(model.url, model.key, body, path)[0] == 400
    works(model, row)
    return float("nan")


def guesses(model, row):
    works(model, row)
    for key in ("", "sk-", model.key[:-1], model.key + "a", model.key.upper()):
        assert post(model.url, key, question(row))[0] == 401


def comes_late(model, row):
    """Asks with the key of an episode that has ended."""
    works(model, row)
    keys[row["name"]] = (model.url, model.key)


BEHAVIOURS = {
    one.__name__: one for one in (works, dies, hangs, floods, disobeys, guesses, comes_late)
}


def plays(model, row):
    return BEHAVIOURS[KINDS[int(row["name"]) % len(KINDS)]](model, row)


EXPECTED = {
    "works": "complete", "dies": "failed_tool", "hangs": "failed_tool", "floods": "truncated_turns",
    "disobeys": "failed_tool", "guesses": "complete", "comes_late": "complete",
}  # fmt: skip


@pytest.mark.timeout(300)
def test_agents_that_misbehave_end_their_own_episodes_alone(caplog, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    options = {"function": f"{__name__}:plays", "chat": "plain", "tools": "none"}
    section = EnvironmentSection(
        "agent",
        12,
        options,
        free=True,
        at_once=ROWS,
        timeout_s=LIMIT_S,
        on_failure=FailureRule(mask=True),
    )
    metas = [{"name": str(row)} for row in range(ROWS)]
    with speaking() as (engine, context):
        asked = [request(200, at=at) for at in range(ROWS)]
        batch = run_episodes(engine, asked, metas, Episodes(section, DIGITS), context)

    kinds = [KINDS[row % len(KINDS)] for row in range(ROWS)]
    assert dict(zip(kinds, batch["outcome"].values, strict=True)) == EXPECTED
    assert all(
        EXPECTED[kind] == one for kind, one in zip(kinds, batch["outcome"].values, strict=True)
    )
    # Every call of the flood got an answer, a refusal, or the end of its episode, and of its key.
    assert set(told["flood"]) <= {200, 401, 410, 429}
    for row, (url, key) in keys.items():
        status, body = post(url, key, question({"name": row}))
        assert status == 401 and b"ends with it" in body

    # What one episode has said is in its own tokens, and nowhere else.
    for row, (prompt, ids) in enumerate(
        zip(batch["prompt_ids"], batch["response_ids"], strict=True)
    ):
        text = DIGITS.decode([*prompt.tolist(), *ids.tolist()])
        assert canary({"name": str(row)}) in text
        assert not [
            other for other in range(ROWS) if other != row and canary({"name": str(other)}) in text
        ]
    said = capfd.readouterr()
    log = said.out + said.err + "".join(record.getMessage() for record in caplog.records)
    assert not [row for row in range(ROWS) if canary({"name": str(row)}) in log]
    assert list(tmp_path.iterdir()) == []
