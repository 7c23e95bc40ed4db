"""The worker's side of an engine's process: what it answers, how it ends, what is told of that."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.counting import STEP, Counting, count_from, counting_process

from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.hosting import process as module
from hybridflow.kit.hosting.process import EngineDied, EngineProcess


def ignore(seconds: float) -> None:
    pass


class Leaving(Counting):
    """Says what it finds in its environment, and ends the process instead of sleeping."""

    def start(self) -> None:
        super().start()
        print("mine is", os.environ["MINE"], "and I may write to", os.environ["TMPDIR"])

    def sleep(self) -> None:
        os._exit(7)


class Refusing(Counting):
    def start(self) -> None:
        print("looking for the moon")
        raise RuntimeError("there is no moon")


@pytest.fixture
def running(tmp_path):
    """running(engine_class, **environment) -> (process, bucket); ended with the test."""
    made = []

    def running(engine_class: type = Counting, **environment: str):
        made.append(counting_process(tmp_path / "logs" / "engine.log", engine_class, **environment))
        return made[-1]

    yield running
    for process, bucket in made:
        process.end()
        bucket.close()


def test_calls_are_answered_and_completions_come_as_events(running):
    process, bucket = running()
    process.started(60.0, ignore)
    assert process.pid != os.getpid() and process.ask("sleep", timeout_s=60.0) is None
    process.ask("wake", timeout_s=60.0)
    list(bucket.write("step", STEP, torch.tensor([2.0, 0.5]), torch.float32))
    process.ask("begin_update", 4, timeout_s=60.0)
    process.ask("load", bucket.taken(), timeout_s=60.0)
    process.ask("end_update", timeout_s=60.0)
    before = process.moved
    process.send("add", [count_from(5, 1, tokens=2)])
    kind, done = process.events.get(timeout=60.0)
    assert (kind, done.response_ids.tolist()) == ("done", [7, 9])
    assert done.weight_version.tolist() == [4, 4]
    assert process.moved > before

    process.send("add", [count_from(5, 1, tokens=99)])
    kind, said = process.events.get(timeout=60.0)
    assert kind == "error" and "max_tokens 99 exceed" in said
    with pytest.raises(HybridFlowError, match="end_update outside an update"):
        process.ask("end_update", timeout_s=60.0)

    os.kill(process.pid, signal.SIGTERM)
    said = rf"\(pid {process.pid}\) was killed by SIGTERM; the end of its log"
    with pytest.raises(EngineDied, match=said):
        process.ask("wake", timeout_s=60.0)
    with pytest.raises(EngineDied, match="was killed by SIGTERM"):  # and so from now on
        process.send("wake")


def test_it_has_a_place_of_its_own_and_its_end_is_told_with_its_log(running):
    process, _ = running(Leaving, MINE="blue")
    process.started(60.0, ignore)
    scratch = Path(process.scratch)
    assert scratch.is_dir()
    with pytest.raises(EngineDied) as caught:
        process.ask("sleep", timeout_s=60.0)
    said = str(caught.value)
    assert "ended with exit code 7" in said
    assert f"  | mine is blue and I may write to {scratch}" in said
    assert f"--- engine started {process.log.read_text()[19:38]} by process {os.getpid()}" in said
    assert not scratch.exists() and process.process.poll() == 7
    process.end()


def test_its_place_is_in_the_folder_that_is_removed_with_the_run(running, monkeypatch, tmp_path):
    monkeypatch.setenv(module.SCRATCH, str(tmp_path))
    process, _ = running()
    assert Path(process.scratch).parent == tmp_path


def test_one_that_fails_to_start_says_why(running, monkeypatch):
    monkeypatch.setattr(module, "PROGRESS_S", 0.05)
    waited: list[float] = []
    process, _ = running(Refusing)
    said = r"failed: RuntimeError: there is no moon(?s:.*)looking for the moon"
    with pytest.raises(EngineDied, match=said):
        process.started(60.0, waited.append)
    assert waited and waited == sorted(waited)
    assert "Traceback" in process.tail()


def test_one_that_does_not_answer_in_time_is_ended(tmp_path):
    process = EngineProcess(tmp_path / "log", {})  # nobody tells it what to start
    with pytest.raises(EngineDied, match="gave no answer to start within 0 s"):
        process.started(0.2, ignore)
    assert process.process.poll() == -signal.SIGKILL


def test_the_tail_of_a_log_is_its_last_lines(tmp_path, running):
    process, _ = running()
    process.end()
    process.log.write_text("".join(f"line {at}\n" for at in range(100)))
    lines = process.tail().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (20, "  | line 80", "  | line 99")
    process.log.unlink()
    assert "(not readable: " in process.tail()
