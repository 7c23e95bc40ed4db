"""What runs in a rank's process: workers by role, messages in, replies out, failures among them."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.batches import CountingStore, plain

from hybridflow.core.contracts.worker import Worker
from hybridflow.core.errors import HybridFlowError, WorkerDied, WorkerError
from hybridflow.core.groups.host import Host, Reply, read_call, read_reply, write_call
from hybridflow.core.groups.rendezvous import FileRendezvous
from hybridflow.core.groups.wire import Encoder
from hybridflow.core.values.batch import Batch, PromisedTable, View
from hybridflow.core.values.parallel import ParallelLayout, generation_layout

LAYOUT = ParallelLayout(dp=3)


class Counter(Worker):
    closed: list[str] = []

    def __init__(self, context, start, step=1):
        super().__init__(context)
        self.count, self.step = start, step

    def add(self, by=0):
        self.count += self.step + by
        return self.count

    def where(self):
        context = self.context
        return context.role, context.rank, context.world_size, context.seed, str(context.device)

    def total(self, batch):
        return float(batch["x"].values.sum())

    def fail(self, error):
        raise error

    def close(self):
        self.closed.append(self.context.role)


class Ranks:
    """Sends to one host, as a group does."""

    def __init__(self, rank=1, world=3):
        self.store = CountingStore()
        self.host = Host("main", rank, range(world), self.store)

    def create(self, role="counter", *args, cls=Counter, **kwargs) -> Reply:
        return self.call("__create__", cls, args, kwargs, LAYOUT, None, 7, role=role)

    def call(self, name, *args, role="counter", keep=True, replies=(), **kwargs) -> Reply:
        encoder = Encoder(self.store)
        blob = write_call(role, name, keep, encoder.dumps((args, kwargs)))
        return read_reply(*self.host.call(blob, encoder.handles, replies), self.store)


@pytest.fixture
def ranks():
    return Ranks()


def test_a_call_is_read_as_it_was_written():
    blob = write_call("actor", "update", True, b"arguments")
    assert read_call(blob) == (("actor", "update", True), b"arguments")
    assert read_call(write_call("", "", False, b"")) == (("", "", False), b"")


def test_a_worker_is_made_with_its_place_and_called_by_name(ranks):
    assert ranks.create("counter", 10, step=2).error is None
    assert [ranks.call("add").value, ranks.call("add", by=5).value] == [12, 19]
    assert ranks.call("where").value == ("counter", 1, 3, 7, "cpu")


def test_roles_of_one_process_do_not_meet(ranks):
    ranks.create("counter", 0)
    ranks.create("other", 100)
    assert ranks.call("add").value == 1 and ranks.call("add", role="other").value == 101


def test_a_result_that_does_not_count_is_not_sent(ranks):
    ranks.create("counter", 0)
    assert ranks.call("add", keep=False).value is None
    assert ranks.call("add").value == 2  # it was run all the same


def test_a_reply_says_when_the_worker_began_and_ended(ranks):
    before = time.time()
    ranks.create("counter", 0)
    reply = ranks.call("add")
    assert before <= reply.started <= reply.ended <= time.time()


def test_a_failure_is_a_reply_with_the_place_and_the_traceback(ranks):
    ranks.create("counter", 0)
    error = ranks.call("fail", KeyError("no such unit")).error
    assert (error.role, error.phase, error.rank) == ("counter", "fail", 1)
    assert error.message == "KeyError: 'no such unit'" and "raise error" in error.remote_traceback
    plainly = ranks.call("fail", HybridFlowError("look at the data")).error
    assert plainly.message == "look at the data"
    assert ranks.call("fail", SystemExit(3)).error.message == "SystemExit: 3"
    assert ranks.call("add").value == 1  # and it goes on


def test_a_user_who_interrupts_the_only_rank_gets_through():
    alone, one_of_three = Ranks(rank=0, world=1), Ranks()
    for ranks in (alone, one_of_three):
        ranks.create("counter", 0)
    with pytest.raises(KeyboardInterrupt):
        alone.call("fail", KeyboardInterrupt())
    told = one_of_three.call("fail", KeyboardInterrupt()).error
    assert told.message.startswith("KeyboardInterrupt")


def test_a_role_that_is_not_there_and_one_that_was_not_built_are_told(ranks):
    assert "there is no worker of role 'counter' here" in ranks.call("add").error.message
    refused = ranks.create("counter", 0, colour="red").error
    assert refused.phase == "__create__" and "colour" in refused.message
    assert "there is no worker" in ranks.call("add").error.message
    ranks.create("counter", 0)
    assert "no attribute 'subtract'" in ranks.call("subtract").error.message


def test_a_message_that_cannot_be_read_is_a_failure_of_nobody(ranks):
    reply = read_reply(*ranks.host.call(b"nonsense", [], []), ranks.store)
    assert (reply.error.role, reply.error.phase, reply.error.rank) == ("?", "?", 1)


def pending() -> Batch:
    """The result of a call that is not back yet."""
    table = PromisedTable(lambda: pytest.fail("it was waited for"), 2, ("x",), object())
    return Batch.of_views([View((table,))])


def replied(value, store, failed=False) -> tuple:
    encoder = Encoder(store)
    return encoder.dumps((0.0, 1.0, (), value)), encoder.handles, failed


def test_the_result_of_another_call_arrives_as_an_argument(ranks):
    ranks.create("counter", 0)
    came = replied(Batch({"x": torch.tensor([2.0, 3.0])}), ranks.store)
    assert ranks.call("total", pending(), replies=[came]).value == 5.0


def test_a_call_whose_input_failed_fails_with_that_first_failure(ranks):
    ranks.create("counter", 0)
    first = WorkerDied("the process is gone", role="actor", phase="generate", rank=2)
    error = ranks.call("total", pending(), replies=[replied(first, ranks.store, failed=True)]).error
    assert type(error) is WorkerDied
    assert (error.role, error.phase, error.rank) == ("actor", "generate", 2)


def test_large_results_stay_in_the_store(ranks):
    class Maker(Worker):
        def make(self, rows):
            return Batch({"x": torch.arange(rows, dtype=torch.float32)})

    ranks.create("maker", cls=Maker)
    small, large = (ranks.call("make", rows, role="maker").value for rows in (2, 5000))
    assert ranks.store.bytes_put == 4 * 5000
    assert plain(small["x"]) == [0, 1] and plain(large.take([4999])["x"]) == [4999]


def test_closing_a_role_and_leaving_close_the_workers(ranks, monkeypatch):
    monkeypatch.setattr(Counter, "closed", [])
    for role in ("counter", "other", "third"):
        ranks.create(role, 0)
    ranks.call("__delete__", role="other")
    assert Counter.closed == ["other"]
    assert "no worker of role 'other'" in ranks.call("add", role="other").error.message
    assert ranks.call("__delete__", role="other").error is None  # a second time does nothing
    ranks.host.leave()
    assert Counter.closed == ["other", "counter", "third"] and ranks.host.workers == {}


def test_a_group_is_joined_once_and_ended_by_who_made_it():
    assert not dist.is_initialized()
    first, second = Host("main", 0, [0], CountingStore()), Host("other", 0, [0], CountingStore())
    first.join(None, "cpu", 7.0)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=7)
    second.join(None, "cpu")  # a pool of one rank shares the process, and its group
    assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
    with pytest.raises(HybridFlowError, match=r"is initialised already, with 1 ranks"):
        Host("wide", 0, [0, 1], CountingStore()).join(FileRendezvous("/no/such/folder"), "cpu")
    second.leave()
    assert dist.is_initialized()
    first.leave()
    assert not dist.is_initialized()


def test_one_that_meets_nobody_is_alone_in_its_group():
    late = Host("main", 3, [3], CountingStore())
    late.join(None, "cpu")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    late.leave()


def test_a_worker_knows_the_ranks_of_its_process_group_alone():
    pool = ParallelLayout(dp=6)
    replicas = generation_layout(pool, tp=2, grouping="consecutive")
    ranks = Ranks()
    ranks.host = Host("engines", 5, replicas.ranks(2), ranks.store)
    assert ranks.call("__create__", Counter, (0,), {}, pool, replicas, 7).error is None
    context = ranks.host.workers["counter"].context
    assert (context.rank, context.pool_rank, context.world_size) == (1, 5, 2)
    assert context.generation.replicas == (((0, 1),),)
    assert (replicas.ranks(2), replicas.replica_of[5]) == ([4, 5], 2)


def test_ranks_are_let_in_at_a_host_until_it_leaves():
    host = Host("main", 0, [0, 1], CountingStore())
    meeting = host.serve("127.0.0.1", b"k" * 32)
    meeting.store(2, 5.0).set("here", "1")
    assert meeting.store(2, 5.0).get("here") == b"1"
    host.leave()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((meeting.host, meeting.port))


def test_an_error_is_given_back_as_the_same_error():
    store = CountingStore()
    error = WorkerError("why", role="actor", phase="update", rank=0, remote_traceback="where")
    reply = read_reply(*replied(error, store, failed=True), store)
    assert reply.value is None and str(reply.error) == str(error)
    assert (reply.started, reply.ended) == (0.0, 1.0)


def test_on_a_gpu_attention_is_not_cudnns(monkeypatch, tmp_path):
    joined = {}

    def join(backend, **settings):
        joined.update(settings, backend=backend)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: joined.update(device=device))
    monkeypatch.setattr(dist, "init_process_group", join)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    host = Host("main", 0, [0, 1], CountingStore())
    try:
        host.join(FileRendezvous(str(tmp_path / "a")), "cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
        host.join(FileRendezvous(str(tmp_path / "b")), "cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert (joined["device"].type, joined["backend"]) == ("cuda", "cpu:gloo,cuda:nccl")
