"""Engines that work on while the controller waits: who is asked, how long, and what their replies bring about."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import WorkerError
from hybridflow.core.groups.group import Pool, WorkerGroup
from hybridflow.core.groups.outbox import Outbox
from hybridflow.core.plugins import registry
from hybridflow.core.running import serving as module
from hybridflow.core.running.serving import Serving
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.parallel import ParallelLayout, generation_layout


class Engine(Worker):
    """An engine that takes 2 ms a step, and has so many of them to do."""

    def __init__(self, context):
        super().__init__(context)
        self.left, self.asked, self.done = 0, [], []

    @register(Protocol.ONE_TO_ALL)
    def give(self, steps: int) -> None:
        self.left = steps * (1 + self.rank // 2)
        self.done = []

    @register(Protocol.ONE_TO_ALL)
    def advance(self, most: int) -> tuple[bool, list[int]]:
        if self.left < 0:
            raise ValueError("it broke")
        self.asked.append(most)
        time.sleep(0.002 * min(most, self.left))
        self.left -= min(most, self.left)
        return self.left > 0, [] if self.left else [7]

    @register(Protocol.ONE_TO_ALL)
    def seen(self) -> tuple[list[int], int]:
        return self.asked, self.left

    @register(Protocol.THREE_D, reads=("x",), writes=("x",), late=True)
    def collect(self, batch: Batch) -> Batch:
        assert not self.left
        return batch


class Trainer(Worker):
    @register(Protocol.ONE_TO_ALL)
    def work(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def made(monkeypatch):
    """(outbox, engines of two replicas of two ranks, a trainer's group); the ranks are threads."""
    monkeypatch.setattr(module, "MOMENT_S", 0.02)
    runtime = registry().get("runtime", "inline")(None)
    runtime.start()
    outbox = Outbox({"engines"})
    engines, trainer = (
        WorkerGroup(
            worker, Pool.launch(ResourcePool(name, (size,)), runtime), name=name, outbox=outbox,
            generation=generation_layout(ParallelLayout(dp=4), tp=2, grouping="consecutive"),
        )
        for worker, name, size in ((Engine, "engines", 4), (Trainer, "trainer", 2))
    )  # fmt: skip
    yield outbox, engines, trainer
    outbox.serving = None
    runtime.shutdown()


def seen_at_the_end(engines: WorkerGroup, trainer: WorkerGroup) -> list[tuple[list[int], int]]:
    """What was asked of each rank, once none has work: nobody but the controller's waits gives them any time."""
    for _ in range(200):
        trainer.work(0.1).result()
        seen = engines.seen().result()
        if not any(left for _, left in seen):
            return seen
    raise AssertionError(f"steps are left: {[left for _, left in seen]}")


def test_engines_work_while_another_reply_is_waited_for_and_send_for_what_is_complete(made):
    outbox, engines, trainer = made
    serving = Serving([engines], outbox)
    assert [replica.ranks for replica in serving.replicas] == [[0, 1], [2, 3]]
    engines.give(40).result()
    outbox.step = 7
    with outbox.holding(lambda call: None):
        collected = engines.collect(Batch({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}))
    serving.wake()
    # 40 steps and 80: both replicas end, and the held call goes out.
    seen = seen_at_the_end(engines, trainer)
    assert collected["x"].values.tolist() == [1.0, 2.0, 3.0, 4.0]

    # Both ranks of a replica are asked alike; each call takes about a moment after some.
    asked = [steps for steps, _ in seen]
    assert asked[0] == asked[1] and asked[2] == asked[3]
    assert asked[2][0] == 1 < max(asked[2]) <= 20
    # Who has no work is not asked.
    trainer.work(0.1).result()
    assert engines.seen().result() == seen and serving.references == []


def test_a_pause_waits_for_what_is_under_way_and_nothing_follows(made):
    outbox, engines, trainer = made
    serving = Serving([engines], outbox)
    engines.give(1000).result()
    serving.wake()
    trainer.work(0.1).result()
    serving.pause()
    assert serving.references == [] and outbox.serving is None
    left = [left for _, left in engines.seen().result()]
    assert all(0 < one < 2000 for one in left)
    trainer.work(0.1).result()
    assert [left for _, left in engines.seen().result()] == left
    serving.wake()
    trainer.work(0.1).result()
    serving.pause()
    assert all(now < then for (_, now), then in zip(engines.seen().result(), left, strict=True))


def test_work_that_comes_behind_the_calls_under_way_is_done(made):
    outbox, engines, trainer = made
    serving = Serving([engines], outbox)
    engines.give(1)
    serving.wake()
    # Two calls are under way for each replica, which end the work that they know of.
    assert [len(replica.calls) for replica in serving.replicas] == [2, 2]
    engines.give(30)
    serving.wake()
    seen_at_the_end(engines, trainer)


def test_an_engine_that_fails_ends_whatever_is_waited_for(made):
    outbox, engines, trainer = made
    serving = Serving([engines], outbox)
    engines.give(-1).result()
    serving.wake()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="it broke"):
        trainer.work(3.0).result()
    assert time.monotonic() - began < 2.0


def test_where_nothing_overlaps_nobody_is_asked():
    outbox = Outbox()
    serving = Serving([], outbox)
    serving.wake()
    runtime = SimpleNamespace(wait=lambda reply: (reply, [], False))
    assert outbox.wait(runtime, b"a") == (b"a", [], False)
    serving.pause()
