"""The process of an engine: its messages, its steps between them, and its end with its worker."""

from __future__ import annotations

import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from helpers.counting import STEP, Counting, count_from, setup_of
from helpers.paths import matrix

from hybridflow.core.errors import HybridFlowError
from hybridflow.kit.hosting.bucket import Bucket
from hybridflow.kit.hosting.child import Child


class Talk:
    """A child in this process, whose messages come from here, and what it says in its turns."""

    def __init__(self, engine_class: type = Counting, tp: int = 1):
        self.bucket = Bucket(torch.device("cpu"), 64)
        self.ours, theirs = Pipe()
        self.child = Child(theirs)
        self.child.start(**setup_of(self.bucket, engine_class, tp))

    def tell(self, *messages: tuple) -> list[tuple]:
        for message in messages:
            self.child.inbox.put((0, message))
        self.child.turn()
        return self.heard()

    def heard(self) -> list[tuple]:
        found = []
        while self.ours.poll():
            found.append(self.ours.recv())
        return found

    def update(self, version: int, step: float) -> list[tuple]:
        """The messages of a weight update."""
        list(self.bucket.write("step", STEP, torch.tensor([step, 0.5]), torch.float32))
        return [("begin_update", version), ("load", self.bucket.taken()), ("end_update",)]


@pytest.fixture
def talk():
    made: list[Talk] = []

    def talk(*given) -> Talk:
        made.append(Talk(*given))
        return made[-1]

    yield talk
    for one in made:
        one.bucket.close()


def test_weights_are_loaded_and_requests_answered(talk):
    one = talk()
    asked = [count_from(5, 7, tokens=2), count_from(20, 8, tokens=1)]
    said = one.tell(*one.update(3, 2.0), ("add", asked))
    assert [kind for kind, _ in said] == ["answer", "answer", "answer", "done"]
    assert said[-1][1].id == 8 and one.child.steps == 1
    [(kind, done)] = one.tell()
    assert (kind, done.id) == ("done", 7) and done.response_ids.tolist() == [7, 9]
    assert done.weight_version.tolist() == [3, 3] and done.logprobs.tolist() == [-0.5, -0.5]


def test_a_refused_request_is_answered_too_and_the_others_run(talk):
    one = talk()
    refused = count_from(5, 1, tokens=1000, prefix_ids=[8, 9])
    said = one.tell(*one.update(1, 1.0), ("add", [refused, count_from(5, 2, tokens=1)]))[3:]
    assert [kind for kind, _ in said] == ["error", "done", "done"]
    assert "request 1: 1 prompt tokens and max_tokens 1000 exceed" in said[0][1]
    assert (said[1][1].id, said[1][1].finish_reason) == (1, "abort")
    assert said[1][1].response_ids.tolist() == [8, 9] and said[2][1].response_ids.tolist() == [6]


def test_an_abort_is_no_question_and_what_it_ends_comes_out(talk):
    one = talk()
    assert one.tell(*one.update(1, 1.0), ("add", [count_from(5, 1)]))[3:] == []
    [(kind, done)] = one.tell(("abort", [1]))
    assert (kind, done.finish_reason, done.response_ids.tolist()) == ("done", "abort", [6])


def test_the_engine_s_error_is_the_answer(talk):
    one = talk()
    one.tell(*one.update(1, 1.0), ("add", [count_from(5, 1)]))
    said = one.tell(("begin_update", 2))
    [answer] = [value for kind, value in said if kind == "answer"]
    assert isinstance(answer, HybridFlowError) and "while sequences run" in str(answer)


class Failing(Counting):
    def advance(self):
        raise HybridFlowError("out of pages")


def test_a_step_that_fails_is_told_and_ends_what_ran(talk):
    one = talk(Failing)
    said = one.tell(*one.update(1, 1.0), ("add", [count_from(5, 1)]))
    assert said[3:] == [("error", "out of pages")]
    [(kind, done)] = one.tell()
    assert (kind, done.id, done.finish_reason) == ("done", 1, "abort")


def test_an_engine_of_several_devices_is_told_how_many(talk):
    engine = talk(Counting, 2).child.engine
    assert (engine.context.layout.dp, engine.context.generation.tp) == (2, 2)
    assert engine.context.generation.replicas == (((0, 1),),)
    assert talk().child.engine.context.generation is None


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.counting import counting_process
process, bucket = counting_process(Path({log!r}))
process.started(60.0, print)
print("pid", process.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        "time.sleep(60)",
        pytest.param("raise RuntimeError('no')", marks=matrix),
        pytest.param("pass", marks=matrix),
    ],
)
def test_it_ends_with_its_worker_however_that_ends(tmp_path, then):
    tests = Path(__file__).parents[2]
    code = PARENT.format(tests=str(tests), log=str(tmp_path / "log"), then=then)
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **quiet) as parent:
        assert parent.stdout is not None
        pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("pid"))
        if "sleep" in then:
            parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
