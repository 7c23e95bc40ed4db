"""Calls of a step that is written ahead: which go out at once, which wait, and in what order."""

from __future__ import annotations

import pytest
import torch

from hybridflow.core.contracts.protocol import Protocol
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.contracts.worker import Worker, register
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.groups.group import Pool, WorkerGroup, is_held
from hybridflow.core.groups.outbox import Outbox
from hybridflow.core.plugins import registry
from hybridflow.core.values.batch import Batch

RAN: list[str] = []


class Notes(Worker):
    """Notes its calls in the order in which they run; one rank is in the test's own process."""

    @register(Protocol.THREE_D, reads=("x",), writes=("x",))
    def add(self, batch: Batch, name: str) -> Batch:
        RAN.append(f"{name}{self.rank}")
        return Batch({"x": batch["x"].values + 1})

    @register(Protocol.THREE_D, early=True)
    def note(self, batch: Batch, name: str) -> None:
        RAN.append(f"{name}{self.rank}")

    @register(Protocol.THREE_D, reads=("x",), writes=("x",), late=True)
    def gather(self, batch: Batch, name: str) -> Batch:
        RAN.append(f"{name}{self.rank}")
        return Batch({"x": batch["x"].values + 1})

    @register(Protocol.THREE_D, same_rows=False)
    def count(self, batch: Batch, name: str) -> int:
        RAN.append(f"{name}{self.rank}")
        return batch.rows


@pytest.fixture
def made():
    """(outbox, group in a pool in which nothing is trained, one in a pool in which something is)."""
    RAN.clear()
    runtime = registry().get("runtime", "inline")(None)
    runtime.start()
    outbox = Outbox({"free"})
    groups = [
        WorkerGroup(
            Notes, Pool.launch(ResourcePool(name, (size,)), runtime), name=name, outbox=outbox
        )
        for name, size in (("free", 2), ("trained", 1))
    ]
    yield outbox, *groups
    runtime.shutdown()


def rows(*values: float) -> Batch:
    return Batch({"x": torch.tensor(values)})


def unread(call) -> None:
    raise AssertionError(f"{call.role}.{call.method} was read")


def test_calls_to_pools_without_training_go_out_and_others_wait_in_order(made):
    outbox, free, trained = made
    with outbox.holding(unread):
        first = trained.count(rows(1.0), "a")
        ahead = free.add(rows(1.0, 2.0), "b")
        assert ahead["x"].values.tolist() == [2.0, 3.0]
        trained.add(ahead, "c")
        assert sorted(RAN) == ["b0", "b1"]
    outbox.release(0)
    assert RAN[2:] == ["a0", "c0"] and first.result() == [1]
    trained.count(rows(), "d")  # later calls go out at once again
    assert RAN[-1] == "d0"


def test_a_call_with_an_input_that_waits_waits_on_all_ranks(made):
    outbox, free, trained = made
    with outbox.holding(unread):
        late = trained.add(rows(1.0), "late")
        # Rank 0 gets the row that waits, rank 1 one that is there.
        both = free.add(Batch.concat([late, rows(5.0)]), "both")
        after = free.add(rows(7.0, 8.0), "after")
        assert is_held(late) and is_held(both) and not is_held(after)
        assert after["x"].values.tolist() == [8.0, 9.0] and sorted(RAN) == ["after0", "after1"]
    outbox.release(0)
    assert both["x"].values.tolist() == [3.0, 6.0]
    assert RAN[2] == "late0" and sorted(RAN[3:]) == ["both0", "both1"]


def test_a_result_that_is_read_brings_about_the_turn(made):
    outbox, _, trained = made
    turns = []

    def turn(call) -> None:
        turns.append(f"{call.role}.{call.method}")
        RAN.append("turn")
        outbox.release(0)

    with outbox.holding(turn):
        first = trained.add(rows(1.0), "first")
        second = trained.add(first, "second")
        assert second["x"].values.tolist() == [3.0]
        # From here on it is the step's turn.
        trained.add(second, "third")
    assert RAN == ["turn", "first0", "second0", "third0"] and turns == ["trained.add"]


def test_an_early_call_goes_out_at_once_to_any_pool_unless_it_reads_what_waits(made):
    outbox, _, trained = made
    with outbox.holding(unread):
        late = trained.add(rows(1.0), "late")
        trained.note(rows(1.0), "early")
        trained.note(late, "waits")
        assert RAN == ["early0"]
    outbox.release(0)
    assert RAN == ["early0", "late0", "waits0"]


def test_steps_are_released_in_order_and_an_earlier_one_may_be_read_meanwhile(made):
    outbox, _, trained = made
    made_by = {}
    demanded = []

    def turn(call) -> None:
        demanded.append(call.step)
        outbox.release(call.step)

    for step in (1, 2):
        outbox.step = step
        with outbox.holding(turn):
            made_by[step] = trained.add(rows(float(step)), f"step {step}, ")
            if step == 2:
                # What step 1 has made is read as step 2 is written, whose own calls go on waiting.
                assert made_by[1]["x"].values.tolist() == [2.0]
                trained.add(rows(0.0), "held, ")
                assert RAN == ["step 1, 0"]
    outbox.step = 3
    with outbox.holding(turn):
        trained.add(rows(0.0), "step 3, ")
    outbox.release(2)
    assert demanded == [1] and RAN[1:] == ["step 2, 0", "held, 0"]
    outbox.release(3)
    assert RAN[3:] == ["step 3, 0"]


def test_a_turn_that_comes_while_a_call_is_encoded_sends_that_call_too(made):
    outbox, _, trained = made

    def read(reply):
        yield from ()
        outbox.demand(reply.call)

    with outbox.holding(lambda call: outbox.release(0)):
        first = trained.add(rows(1.0), "first")
        [table] = first.views[0].tables
        outbox.post("trained", read(table.reply))  # encoding reads the reply of the first
        assert RAN == ["first0"] and not outbox.holds
        assert trained.add(first, "second")["x"].values.tolist() == [3.0]


def test_calls_of_a_step_without_a_turn_are_never_made(made):
    outbox, _, trained = made
    outbox.step = 7
    with outbox.holding(unread):
        lost = trained.add(rows(1.0), "lost")
    outbox.drop()
    outbox.release(0)
    with pytest.raises(HybridFlowError, match=r"result of trained\.add is read, and step 7"):
        lost["x"]
    assert RAN == []


def test_a_late_call_and_what_needs_it_wait_until_they_are_free(made):
    outbox, free, trained = made
    outbox.step = 2
    with outbox.holding(unread):
        late = free.gather(rows(1.0, 2.0), "late")
        needs = free.add(late, "needs")
        turn = trained.add(needs, "turn")
        after = free.add(turn, "after")
        assert RAN == [] and is_held(late) and is_held(needs)
        outbox.free(1)  # of another step
        assert RAN == []
        outbox.free(2)
        assert needs["x"].values.tolist() == [3.0, 4.0]
        assert sorted(RAN) == ["late0", "late1", "needs0", "needs1"]
        assert is_held(turn) and is_held(after)
    outbox.release(2)
    assert after["x"].values.tolist() == [5.0, 6.0]
    # In its turn a late call goes out at once.
    assert free.gather(rows(7.0, 8.0), "now")["x"].values.tolist() == [8.0, 9.0]


def test_a_late_call_that_is_read_need_not_have_its_turn(made):
    outbox, free, trained = made
    demanded = []

    def turn(call) -> None:
        demanded.append(outbox.has(call))
        outbox.free(call.step)

    outbox.step = 1
    with outbox.holding(turn):
        held = trained.add(rows(0.0), "held")
        for _ in range(2):  # its step goes on holding what it must
            assert free.gather(rows(1.0), "late")["x"].values.tolist() == [2.0]
        assert is_held(held) and demanded == [True, True]
    assert sorted(RAN) == ["late0", "late0", "late1", "late1"]


class Counts:
    """Serves a number of replies that are there before the one that is waited for."""

    def __init__(self, references):
        self.references, self.taken = list(references), []

    def arrived(self, reference):
        self.references.remove(reference)
        self.taken.append(reference)


def test_others_are_served_while_a_reply_is_waited_for():
    class Runtime:
        def first(self, replies):
            return min(replies)

        def wait(self, reply):
            return (bytes([reply]), [], False)

    outbox = Outbox()
    assert outbox.wait(Runtime(), 3) == (b"\3", [], False)
    outbox.serving = serving = Counts([2, 1, 4])
    assert outbox.wait(Runtime(), 3) == (b"\3", [], False)
    assert serving.taken == [1, 2] and serving.references == [4]
    assert outbox.serving is serving
