"""Twenty agents, most of which misbehave: the others' episodes go on, and none of them gets at another's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from helpers.episodes import request, speaking
from helpers.programs import run as isolates
from helpers.sources import char

from hybridflow.core.contracts.failure import FailureRule
from hybridflow.core.job.sections import EnvironmentSection
from hybridflow.core.workers.episode_runner import run_episodes
from hybridflow.core.workers.episodes import Episodes
from hybridflow.kit.chat.conversation import MOST_WAITING
from hybridflow.kit.chat.endpoint import CONNECTIONS
from hybridflow.kit.sandbox.process import Limits

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


def canaries_stay(batch, caplog, capfd) -> None:
    """What one episode has said is in its own tokens, and nowhere else."""
    canaries = [canary({"name": str(row)}) for row in range(batch.rows)]
    for own, prompt, ids in zip(canaries, batch["prompt_ids"], batch["response_ids"], strict=True):
        text = DIGITS.decode([*prompt.tolist(), *ids.tolist()])
        assert [one for one in canaries if one in text] == [own]
    said = capfd.readouterr()
    log = said.out + said.err + "".join(record.getMessage() for record in caplog.records)
    assert not [one for one in canaries if one in log]


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
    canaries_stay(batch, caplog, capfd)
    assert list(tmp_path.iterdir()) == []


ASK = """
import http.client, json, os, re, socket, subprocess, sys, threading, time, urllib.parse
key = os.environ["OPENAI_API_KEY"]
where = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
def ask(text, key=key, port=where.port):
    client = http.client.HTTPConnection(where.hostname, port, timeout=60)
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2})
    client.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
    return client.getresponse().status
said = open("canary").read()
print(ask(said + "+"), flush=True)
"""
COMMANDS = {
    "asks": "",
    "ends_itself": "os.kill(os.getpid(), 9)",
    "sleeps": "time.sleep(600)",
    "floods_connections": """
held = []
for _ in range(20):
    if os.fork() == 0:
        for _ in range(60):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((where.hostname, where.port))
            held.append(one)
        time.sleep(600)
os.wait()
""",
    "bombs": "while True:\n    os.fork()",
    "fills": "while True:\n    print(key * 1000)",
    "takes_memory": "held = [bytearray(10**7) for _ in range(10**4)]",
    "guesses_keys": """
print([ask(said, other) for other in ("", "sk-", key[:-1], key + "a")])
""",
    "looks_around": """
found = []
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/usr", sys.base_prefix)]
    for name in files:
        try:
            found.append(open(os.path.join(folder, name)).read(10_000))
        except (OSError, UnicodeError):
            pass
assert said in found
print([text for text in found if re.search("90[0-9][0-9]09", text) and text != said])
for port in range(1, 65536):
    with socket.socket() as one:
        reached = not one.connect_ex((where.hostname, port))
        # A socket may reach itself, where its own port is the one that it tries.
        if reached and port != where.port and one.getpeername() != one.getsockname():
            print("open:", port)
""",
}
"""What agents in the sandbox do after a first question."""
SANDBOXED = (*COMMANDS, "asks")
ENDLESS = ("sleeps", "floods_connections", "bombs")


def plays_in_a_sandbox(model, row):
    kind = SANDBOXED[int(row["name"])]
    limits = Limits(
        seconds=5.0 if kind in ENDLESS else 50.0, memory_mb=150, disk_mb=2, processes=24
    )
    with model.sandbox(limits=limits) as box:
        box.write("canary", canary(row))
        box.write("agent.py", ASK + COMMANDS[kind])
        made = box.run(["python3", "agent.py"])
        told[kind] = made
        # Its files are there, and what it has started is not, for whoever judges it.
        assert box.read("canary").decode() == canary(row)
        assert box.run(["sh", "-c", "kill -0 -1"]).status
        return float(made.good)


@pytest.mark.timeout(300)
def test_commands_in_a_sandbox_that_misbehave_end_alone(caplog, capfd, tmp_path, monkeypatch):
    isolates("pass")
    told.clear()
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    options = {"function": f"{__name__}:plays_in_a_sandbox", "chat": "plain", "tools": "none"}
    rows = len(SANDBOXED)
    section = EnvironmentSection("agent", 400, options, free=True, at_once=rows, timeout_s=60.0)
    metas = [{"name": str(row)} for row in range(rows)]
    descriptors = len(os.listdir("/proc/self/fd"))
    most = []
    with speaking() as (engine, context):
        asked = [request(200, at=at) for at in range(rows)]
        over = threading.Event()

        def watches():
            while not over.wait(0.05):
                most.append(len(os.listdir("/proc/self/fd")))

        threading.Thread(target=watches, daemon=True).start()
        batch = run_episodes(engine, asked, metas, Episodes(section, DIGITS), context)
        over.set()

    assert batch["outcome"].values == ["complete"] * rows
    rewards = [sum(one) for one in batch["turn_rewards"].values]
    assert {kind for kind, reward in zip(SANDBOXED, rewards, strict=True) if reward} == {
        "asks", "guesses_keys", "looks_around",
    }, told  # fmt: skip
    assert all(outcome.output.startswith("200\n") for outcome in told.values()), told
    assert told["guesses_keys"].output == "200\n[401, 401, 401, 401]\n"
    assert told["looks_around"].output == "200\n[]\n"
    assert [told[kind].reason for kind in ("sleeps", "floods_connections", "fills")] == [
        "time", "time", "output",
    ]  # fmt: skip
    # A flood of 1,200 connections took 32 descriptors of this process.
    assert max(most) < descriptors + rows * 12 + CONNECTIONS
    canaries_stay(batch, caplog, capfd)
    assert list(tmp_path.iterdir()) == []
