"""The smallest run there is, as TOML: two-digit sums, 2 layers, a handful of steps."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from hybridflow.cli.main import main

MODEL = (
    '{ model_type = "qwen2", vocab_size = 16, hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 4, '
    "num_key_value_heads = 2, intermediate_size = 128, max_position_embeddings = 32, tie_word_embeddings = true }"
)

GRPO = f"""
algorithm = {{ name = "grpo", prompts_per_step = 4, group_size = 4, mini_batch_size = 8 }}
runtime = "inline"
[run]
steps = 6
folder = "runs"
trackers = ["jsonl"]
[pools]
main = [1]
[tokenizer]
characters = "0123456789+="
[data]
source = "arithmetic"
bos = true
answer = "{{answer}}"
max_prompt_tokens = 8
[sampling]
max_tokens = 4
[reward]
function = "rewards:digits"
[actor]
model.config = {MODEL}
optimizer = {{ lr = 1e-3 }}
"""

REWARDS = '''
"""Rewards of the tests, found from the run's folder."""
import os, pathlib, signal, threading


def digits(sample):
    """The share of digits that are right, so that groups differ."""
    return sum(a == b for a, b in zip(sample.response, sample.answer)) / 3 + 0.01 * len(set(sample.response))


def _once(flag, at):
    """True in call number `at` of this process, once per flag file."""
    _once.calls = getattr(_once, "calls", 0) + 1
    if _once.calls == at and not pathlib.Path(flag).exists():
        pathlib.Path(flag).write_text("done")
        return True
    return False


def kills_itself(sample, flag="killed", at=70):
    if _once(flag, at):
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(sample)


def always_kills_itself(sample, at):
    _once.calls = getattr(_once, "calls", 0) + 1
    if _once.calls == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(sample)


def asks_to_stop(sample, flag="stopped", at=40):
    if _once(flag, at):
        os.kill(os.getpid(), signal.SIGTERM)
    return digits(sample)


def raises(sample):
    raise KeyError("no such unit")


seen = []


def raises_later(sample):
    """A run asks one row beforehand, when no engine has been started."""
    seen.append(sample)
    return raises(sample) if len(seen) == 50 else 0.0


def is_nan(sample):
    return float("nan")
'''


TOLD = """

# The trainer and the process of data and rewards say which they are.
from hybridflow.algorithms.grpo import GRPO


def tell(name):
    pathlib.Path(__file__).with_name(f"{name}.{os.getpid()}").touch()


def told(sample):
    tell("data")
    return digits(sample)


class ToldLoss(GRPO.loss):
    def __call__(self, *args, **others):
        tell("trainer")
        return super().__call__(*args, **others)


class Told(GRPO):
    loss = ToldLoss
"""
"""Added to REWARDS: the algorithm `rewards:Told` and the reward `rewards:told` say which processes have them."""


def write(folder: Path, text: str = GRPO, **replaced: str) -> Path:
    """The config (and the rewards beside it) in a folder; `replaced`: old text -> new, keys as in `text`."""
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def hybridflow(
    folder: Path, *arguments: str, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """The command, in the folder, as a user types it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "hybridflow.cli.main", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )


def ran(folder: Path, *settings: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """A run of the folder's tiny.toml that ends well."""
    done = hybridflow(folder, "run", "tiny.toml", *settings, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def ran_here(folder: Path, *settings: str) -> str:
    """What is printed by a run of the folder's tiny.toml that ends well, in this process: it saves the start of one."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setenv("COLUMNS", "200")
        sys.modules.pop("rewards", None)  # of another folder
        try:
            assert main(["run", "tiny.toml", *settings]) == 0, said.getvalue()
        finally:
            sys.modules.pop("rewards", None)
    return said.getvalue()


def exported(run: Path) -> bytes:
    """The file of the actor's exported weights in a run's folder."""
    return (run / "export/actor/model.safetensors").read_bytes()


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learning(folder: Path) -> list[dict[str, float]]:
    """The metrics that do not depend on the clock or on how the run was cut up."""
    clock = ("seconds", "timestamp", "_per_second", "bytes/", "/sync_", "_peak_gb")
    return [
        {k: v for k, v in row.items() if not any(c in k for c in clock)} for row in metrics(folder)
    ]


def marked(mark: str, command: str) -> list[int]:
    """Processes that were started, however indirectly, with MARK in their environment, and have `command` in their own."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment, line = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"MARK={mark}".encode() in environment.split(b"\0") and command.encode() in line:
            found.append(int(folder.name))
    return found


def which_are(victim: int | str, pids: list[int], folder: Path) -> list[int]:
    """The processes that a victim may be, a rank's number, "trainer" or "engine"; none while it is not known (TOLD)."""
    if isinstance(victim, int):
        return [pids[victim]]
    trainer = [pid for pid in pids if (folder / f"trainer.{pid}").exists()]
    told = [*trainer, *(pid for pid in pids if (folder / f"data.{pid}").exists())]
    engines = [pid for pid in pids if pid not in told]
    return (trainer if victim == "trainer" else engines) if len(told) == 2 else []


def killing(
    folder: Path, kills: int, *arguments: str, timeout: float = 600
) -> tuple[int, str, int]:
    """Run the command, and SIGKILL its engine's process so often while its worker waits for it: (exit code, output, kills).

    The process is stopped first: half a second later the worker waits for tokens (or for a weight to be taken).
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "MARK": mark}
    command = [sys.executable, "-m", "hybridflow.cli.main", *arguments]
    done, killed, deadline = folder / "runs/tiny/metrics.jsonl", 0, time.monotonic() + timeout
    with (folder / "out.txt").open("w") as out:
        run = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        after = 1
        while run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            steps = len(done.read_text().splitlines()) if done.exists() else 0
            engines = marked(mark, "hybridflow.kit.hosting.child")
            if killed < kills and steps >= after and len(engines) == 1:
                try:
                    os.kill(engines[0], signal.SIGSTOP)
                    time.sleep(0.5)
                    os.kill(engines[0], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed, after = killed + 1, steps + 2
        if run.poll() is None:
            run.kill()
        code = run.wait()
    return code, (folder / "out.txt").read_text(), killed
