"""Engines that work on while the controller waits: who is asked, how long, and what their replies bring about."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
import torch

from hybridflow.backends.inline.runtime import InlineProcess, InlineRuntime
from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import HybridFlowError, WorkerDied, WorkerError
from hybridflow.core.groups.group import Pool, WorkerGroup, is_held
from hybridflow.core.groups.outbox import Outbox
from hybridflow.core.job.sections import SyncConfig
from hybridflow.core.rollouts.separate import SeparateRollout
from hybridflow.core.running import serving as module
from hybridflow.core.running.serving import Serving
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout, generation_layout
from hybridflow.core.workers.carried import BUSY


class Engine(Worker):
    """An engine that takes 2 ms a step, and completes each of its rows after so many steps."""

    stuck: set[int] = set()
    """Rows that make no progress."""

    def __init__(self, context):
        super().__init__(context)
        self.left, self.asked, self.built = {}, [], False

    @register(Protocol.ONE_TO_ALL)
    def build(self) -> None:
        self.built = True

    @register(Protocol.MICRO_DP)
    def open(self, batch: Batch, sampling: SamplingParams, seed: int) -> None:
        for sample, steps in zip(
            batch["sample_id"].values.tolist(), batch["steps"].values.tolist(), strict=True
        ):
            self.left[sample] = steps

    @register(Protocol.ONE_TO_ALL, same_rows=False)
    def advance(self, most: int) -> Batch:
        self.asked.append(most)
        assert self.built
        if -1 in self.left.values():
            raise ValueError("it broke")
        steps = min(most, max(self.left.values(), default=0))
        time.sleep(0.002 * steps)
        self.left = {
            sample: left - steps * (sample not in Engine.stuck)
            for sample, left in self.left.items()
        }
        done = [sample for sample, left in self.left.items() if left <= 0]
        for sample in done:
            del self.left[sample]
        return Batch(
            {"sample_id": torch.tensor(done)}, Metrics(maxima={BUSY: float(bool(self.left))})
        )

    @register(Protocol.MICRO_DP, same_rows=False)
    def unfinished(self) -> Batch:
        return Batch({"sample_id": torch.tensor(sorted(self.left))})

    @register(Protocol.ONE_TO_ALL)
    def seen(self) -> tuple[list[int], int]:
        return self.asked, max(self.left.values(), default=0)


class Data(Worker):
    """Where responses land."""

    def __init__(self, context):
        super().__init__(context)
        self.rows = []

    @register(Protocol.RANK_ZERO)
    def land(self, role: str, rows: Batch) -> list[int]:
        landed = rows["sample_id"].values.tolist()
        self.rows += landed
        return landed

    @register(Protocol.RANK_ZERO, reads=("sample_id",), writes=("sample_id",), late=True)
    def collect(self, batch: Batch) -> Batch:
        assert set(batch["sample_id"].values.tolist()) <= set(self.rows)
        return batch


class Mortal(InlineProcess):
    """A process that may be killed: its calls then raise WorkerDied."""

    dead = False

    def submit(self, message, label):
        return self.thread.submit(self._live, message)

    def _live(self, message):
        made = None if self.dead else self._run(message)
        if self.dead:
            raise WorkerDied("killed", role="engines", phase="?", rank=self.rank)
        return made


class MortalRuntime(InlineRuntime):
    """Replaces processes, and counts them."""

    replaced = 0

    def launch(self, pool, device, environment):
        made = super().launch(pool, device, environment)
        for process in made:
            process.__class__ = Mortal
        return made

    def ended(self, processes):
        return [process for process in processes if process.dead]

    def replace(self, processes):
        self.replaced += len(processes)
        every = []
        for process in processes:
            fresh = Mortal(process.pool, process.rank)
            self.processes[self.processes.index(process)] = fresh
            every.append(fresh)
        return every


class Rollout(SeparateRollout):
    """Its weights are counted alone."""

    syncs = 0

    def regain(self, replica):
        self.forget()

    def sync(self):
        self.syncs += 1
        self.version = 1


class Trainer(Worker):
    @register(Protocol.ONE_TO_ALL)
    def work(self, seconds: float) -> None:
        time.sleep(seconds)


class Made(NamedTuple):
    outbox: Outbox
    serving: Serving
    rollout: SeparateRollout
    data: WorkerGroup
    trainer: WorkerGroup
    said: list[str]

    @property
    def engines(self) -> WorkerGroup:
        return self.rollout.engines

    def open(self, step: int, *steps: int, at: int = 0) -> Batch:
        """Open rows, numbered from `at`, that are complete after so many steps of their engine."""
        samples = torch.arange(at, at + len(steps))
        rows = Batch({"sample_id": samples, "steps": torch.tensor(steps)})
        self.rollout.open(rows, SamplingParams(), 0, step)
        return rows

    def left(self) -> list[int]:
        return [left for _, left in self.engines.seen().result()]


@pytest.fixture
def make(monkeypatch):
    """make(overlaps, tp, cut): engines on four ranks, a data worker, a trainer; the ranks are threads."""
    monkeypatch.setattr(module, "MOMENT_S", 0.02)
    runtime = MortalRuntime(None)
    runtime.start()
    outbox = Outbox({"engines", "data"})

    def make(overlaps: bool = True, tp: int = 2, cut: bool = True) -> Made:
        shape = generation_layout(ParallelLayout(dp=4), tp=tp, grouping="consecutive")
        replicas = tuple(tuple(shape.ranks(number)) for number in range(4 // tp)) if cut else None
        engines, data, trainer = (
            WorkerGroup(
                worker, Pool.launch(ResourcePool(name, (size,), groups=replicas if size == 4 else None), runtime),
                name=name, outbox=outbox, generation=shape if size == 4 else None,
            )
            for worker, name, size in ((Engine, "engines", 4), (Data, "data", 2), (Trainer, "trainer", 2))
        )  # fmt: skip
        engines.build().result()
        rollout = Rollout(trainer, engines, SyncConfig())
        said: list[str] = []
        serving = Serving({"actor": rollout}, data, outbox, overlaps, True, said.append)
        return Made(outbox, serving, rollout, data, trainer, said)

    Engine.stuck.clear()
    yield make
    Engine.stuck.clear()
    outbox.serving = None
    runtime.shutdown()


@pytest.fixture
def made(make) -> Made:
    return make()


def seen_at_the_end(made: Made) -> list[tuple[list[int], int]]:
    """What was asked of each rank, once none has work: nobody but the controller's waits gives them any time."""
    for _ in range(200):
        made.trainer.work(0.1).result()
        if not any(made.left()):
            made.trainer.work(0.1).result()  # the last calls end, and the last rows land
            return made.engines.seen().result()
    raise AssertionError(f"steps are left: {made.left()}")


def test_engines_work_while_another_reply_is_waited_for_and_a_complete_step_is_collected(made):
    assert [served.replica.ranks for served in made.serving.replicas] == [[0, 1], [2, 3]]
    # 40 steps of the first replica, 80 of the second
    rows = made.open(7, 40, 10, 80, 20)
    made.outbox.step = 7
    with made.outbox.holding(lambda call: None):
        collected = made.data.collect(rows)
    Engine.stuck.add(2)
    made.serving.wake()
    while len(made.rollout.awaited[7]) == 4:
        made.trainer.work(0.02).result()
    assert is_held(collected) and 2 in made.rollout.awaited[7]
    Engine.stuck.clear()
    seen = seen_at_the_end(made)
    assert made.rollout.awaited == {}
    assert collected["sample_id"].values.tolist() == [0, 1, 2, 3]

    # Both ranks of a replica are asked alike; each call takes about a moment after some.
    asked = [steps for steps, _ in seen]
    assert asked[0] == asked[1] and asked[2] == asked[3]
    assert asked[2][0] == 1 < max(asked[2]) <= 20
    # Who has no work is not asked.
    made.trainer.work(0.1).result()
    assert made.engines.seen().result() == seen and made.serving.references == []


def test_a_pause_waits_for_what_is_under_way_and_nothing_follows(made):
    made.open(1, 1000, 1000, 1000, 1000)
    made.serving.wake()
    made.trainer.work(0.1).result()
    made.serving.pause()
    assert made.serving.references == [] and made.outbox.serving is None
    left = made.left()
    assert all(0 < one < 1000 for one in left)
    made.trainer.work(0.1).result()
    assert made.left() == left
    made.serving.wake()
    made.trainer.work(0.1).result()
    made.serving.pause()
    assert all(now < then for now, then in zip(made.left(), left, strict=True))


def test_what_is_complete_at_a_pause_lands_all_the_same(made):
    made.open(1, 1, 1, 1, 1)
    made.serving.wake()
    made.serving.pause()
    assert made.data.land("actor", Batch({"sample_id": torch.tensor([9])})).result() == [9]
    made.serving.complete(1)
    assert made.rollout.awaited == {}


def test_work_that_comes_behind_the_calls_under_way_is_done(made):
    made.open(1, 1, 1, 1, 1)
    made.serving.wake()
    # Two calls are under way for each replica, which end the work that they know of.
    assert [len(served.calls) for served in made.serving.replicas] == [2, 2]
    made.open(2, 30, 30, 30, 30, at=4)
    made.serving.wake()
    seen_at_the_end(made)
    assert made.rollout.awaited == {}


def test_a_step_is_waited_for_and_others_go_on(made):
    made.open(1, 5, 5, 20, 5)
    made.open(2, 1000, 1000, 1000, 1000, at=4)
    made.serving.complete(1)
    assert made.rollout.awaited == {2: {4, 5, 6, 7}} and made.outbox.serving is made.serving
    made.serving.pause()
    with pytest.raises(HybridFlowError, match="rows of step 3 are not complete, and no engine has"):
        made.open(3)
        made.rollout.awaited[3] = {99}
        for rank in range(4):
            made.engines.pool.processes[rank].host.workers["engines"].left.clear()
        made.serving.complete(3)


def test_where_nothing_overlaps_engines_work_for_who_waits_for_them_and_no_step_more(make):
    made = make(overlaps=False)
    made.open(1, 3, 1, 2, 5)
    made.open(2, 30, 30, 30, 30, at=4)
    made.serving.wake()
    made.trainer.work(0.05).result()
    assert made.outbox.serving is None and made.left() == [30, 30, 30, 30]
    made.serving.complete(1)
    assert made.rollout.awaited == {2: {4, 5, 6, 7}} and made.outbox.serving is None
    asked = [steps for steps, _ in made.engines.seen().result()]
    assert asked[0] == asked[2] == [0, 1, 1, 1, 1, 1] and made.left() == [25, 25, 25, 25]


def test_an_engine_that_fails_ends_whatever_is_waited_for(made):
    made.open(1, -1, -1, -1, -1)
    made.serving.wake()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="it broke"):
        made.trainer.work(3.0).result()
    assert time.monotonic() - began < 2.0


def kill(made: Made, rank: int) -> None:
    made.engines.pool.processes[rank].dead = True


def test_others_generate_what_a_lost_replica_had_and_another_takes_its_place(make):
    made = make(tp=1)
    made.open(1, 5, 5, 5, 60)
    Engine.stuck.add(3)
    made.serving.wake()
    while made.rollout.awaited[1] != {3}:
        made.trainer.work(0.02).result()
    made.open(2, 10, 10, 10, 10, at=4)
    made.serving.wake()
    kill(made, 3)
    Engine.stuck.clear()
    made.serving.complete(1)
    made.serving.complete(2)
    assert made.rollout.awaited == {}
    [said] = made.said
    assert said.startswith("the engine of actor on rank 3 of pool 'engines' is gone: another one")
    # Each row has landed once: the lost one's are made by the others, anew.
    assert sorted(landed_of(made)) == list(range(8))

    # It gets rows again once it has weights.
    made.serving.pause()
    made.open(3, 10, 10, 10, 10, at=8)
    assert samples_of_replicas(made) == [[8, 9], [10], [11], []]
    made.serving.regain()
    made.rollout.sync()
    made.serving.resume()
    made.open(4, 10, 10, 10, 10, at=12)
    assert samples_of_replicas(made) == [[8, 9, 12], [10, 13], [11, 14], [15]]
    made.serving.complete(4)
    assert sorted(landed_of(made)) == list(range(16)) and made.data.runtime.replaced == 1


def samples_of_replicas(made: Made) -> list[list[int]]:
    return [
        [sample for given in replica.given for sample in given.samples.tolist()]
        for replica in made.rollout.replicas
    ]


def landed_of(made: Made) -> list[int]:
    return made.data.pool.processes[0].host.workers["data"].rows


@pytest.mark.parametrize("overlaps", [True, False])
def test_rows_of_an_only_engine_wait_for_the_one_that_takes_its_place(make, overlaps):
    made = make(overlaps, tp=1)
    for rank in (0, 1, 2):  # as if there were one
        made.rollout.replicas[rank].alive = False
    made.open(1, 5, 5, 5, 5)
    assert samples_of_replicas(made) == [[], [], [], [0, 1, 2, 3]]
    made.serving.wake()
    kill(made, 3)
    made.serving.complete(1)
    assert made.rollout.awaited == {} and made.rollout.syncs == 1
    assert sorted(landed_of(made)) == [0, 1, 2, 3]


def test_an_engine_that_is_lost_again_and_again_ends_the_run(make):
    made = make(tp=1)
    made.open(1, *[500] * 4)
    made.serving.wake()
    with pytest.raises(WorkerDied, match="killed"):
        for _ in range(5):
            kill(made, 2)
            made.trainer.work(0.05).result()
            made.serving.pause()
            made.serving.regain()
            made.serving.resume()
            made.open(1, *[500] * 4)
            made.serving.wake()
    assert made.data.runtime.replaced == module.MOST_LOSSES


def test_all_ranks_of_a_replica_are_replaced_with_one(make):
    made = make()
    before = list(made.engines.pool.processes)
    made.open(1, *[30] * 4)
    made.serving.wake()
    kill(made, 3)
    made.serving.complete(1)
    [said] = made.said
    assert said.startswith("the engine of actor on ranks 2, 3 of pool 'engines' is gone")
    after = made.engines.pool.processes
    assert after[:2] == before[:2] and not set(after[2:]) & set(before)
    assert sorted(landed_of(made)) == [0, 1, 2, 3]


def test_engines_with_one_process_group_are_not_replaced(make):
    """Something else is in their pool, and would be gone with them."""
    made = make(cut=False)
    made.open(1, *[500] * 4)
    made.serving.wake()
    kill(made, 3)
    with pytest.raises(WorkerDied, match="killed"):
        made.trainer.work(2.0).result()
    assert made.data.runtime.replaced == 0 and made.said == []


def test_a_checkpoint_has_what_the_replicas_have_that_live(make):
    made = make(tp=1)
    made.open(1, *[500] * 4)
    made.serving.wake()
    made.serving.pause()
    kill(made, 1)
    found = [rows["sample_id"].values.tolist() for rows in made.serving.unfinished("actor")]
    assert found == [[0], [2], [3]]  # row 1 is given to the first one, after it was asked
    assert made.serving.unfinished("critic") == []


def test_an_engine_that_ends_while_all_rest_is_found_and_nobody_is_asked_meanwhile(make):
    """As the engines get weights, or for a checkpoint."""
    made = make(tp=1)
    made.open(1, *[500] * 4)
    made.serving.wake()
    made.serving.pause()
    error = WorkerDied("killed", role="engines", phase="begin_update", rank=0)
    assert not made.serving.find_lost(error) and made.said == []
    kill(made, 0)
    assert made.serving.find_lost(error)
    assert len(made.said) == 1 and made.data.runtime.replaced == 1
    assert made.serving.references == [] and made.outbox.serving is None
    assert not made.rollout.replicas[0].alive
    made.serving.regain()
    assert made.rollout.version is None and not made.serving.find_lost(error)  # weights come next
    made.serving.resume()
    assert all(replica.alive for replica in made.rollout.replicas)
