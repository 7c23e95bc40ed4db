"""The stores by which ranks meet: keys and values as torch's own, and for nobody without the key."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Client
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from hybridflow.core.groups import rendezvous
from hybridflow.core.groups.rendezvous import FileRendezvous, ServerRendezvous, StoreServer

KEY = b"k" * 32


@pytest.fixture
def server():
    made = StoreServer("127.0.0.1", KEY)
    yield made
    made.close()


def operations(store: dist.Store) -> list:
    """What a store answers to everything that torch asks of one."""
    store.set("text", "value")
    store.set("empty", b"")
    store.set("bytes", bytes(range(256)))
    return [
        store.get("text"),
        store.get("empty"),
        store.get("bytes"),
        store.add("count", 2**40),
        store.add("count", -3),
        store.get("count"),
        store.check(["text", "count"]),
        store.check(["text", "missing"]),
        store.wait(["text"]),
        store.wait(["text", "empty"], timedelta(seconds=1)),
        store.compare_set("text", "other", "new"),
        store.compare_set("text", "value", "new"),
        store.compare_set("absent", "", "made"),
        store.compare_set("missing", "expected", "not made"),
        store.check(["missing"]),
        store.delete_key("text"),
        store.delete_key("text"),
        store.check(["text"]),
        store.num_keys(),
    ]


def test_it_answers_as_torchs_store_does(server):
    """The expected answers are those of torch's own server."""
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = server.rendezvous.store(2, 5.0)
    before = theirs.num_keys()  # torch has keys of its own
    expected = operations(theirs)
    expected[-1] -= before
    assert operations(ours) == expected


def test_a_key_that_is_set_ends_the_wait_of_another_client(server):
    one, other = (server.rendezvous.store(2, 20.0) for _ in range(2))
    setting = Thread(target=lambda: (time.sleep(0.2), other.set("late", "here")))
    setting.start()
    assert one.get("late") == b"here"
    setting.join()


def test_a_key_that_nobody_sets_is_named_after_the_time(server):
    store = server.rendezvous.store(2, 0.2)
    with pytest.raises(dist.DistStoreError, match=r"no rank has set missing within 0\.2 s"):
        store.get("missing")
    with pytest.raises(dist.DistStoreError, match=r"no rank has set a, b within 0\.1 s"):
        store.wait(["a", "b"], timedelta(seconds=0.1))


def test_a_clone_has_a_connection_of_its_own(server):
    store = server.rendezvous.store(2, 5.0)
    clone = store.clone()
    waiting = Thread(target=lambda: store.wait(["here"]))
    waiting.start()
    clone.set("here", "1")
    waiting.join(5)
    assert not waiting.is_alive()


def test_who_has_another_key_is_not_let_in_and_learns_nothing(server):
    server.rendezvous.store(2, 5.0).set("secret", "value")
    stranger = ServerRendezvous(server.rendezvous.host, server.rendezvous.port, b"x" * 32)
    with pytest.raises(dist.DistStoreError, match="is not the pool's first rank"):
        stranger.store(2, 5.0)


@pytest.mark.parametrize("said", [b"", b"\0" * 64, rendezvous._pack("wait", ["secret"], 1, [])])
def test_a_stranger_without_a_handshake_gets_no_answer_and_delays_nobody(server, said):
    """Each of them keeps a connection open meanwhile."""
    ours = server.rendezvous.store(2, 5.0)
    ours.set("secret", "the value of it")
    address = (server.rendezvous.host, server.rendezvous.port)
    with socket.create_connection(address) as stranger, socket.create_connection(address):
        stranger.sendall(len(said).to_bytes(4, "big") + said)
        server.rendezvous.store(2, 5.0).set("mine", "1")
        stranger.settimeout(0.3)
        heard = b""
        try:
            while piece := stranger.recv(4096):
                heard += piece
        except TimeoutError:
            pass
        assert b"CHALLENGE" in heard and b"the value of it" not in heard
    assert ours.get("mine") == b"1"


def test_silence_is_ended_after_a_time(monkeypatch):
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 1)
    server = StoreServer("127.0.0.1", KEY)
    address = (server.rendezvous.host, server.rendezvous.port)
    with socket.create_connection(address) as stranger:
        stranger.settimeout(10)
        while stranger.recv(4096):
            pass  # the challenge, then the end
    server.close()


def test_a_server_that_is_not_there_or_not_one_is_told(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(dist.DistStoreError, match=rf"is not reached at 127\.0\.0\.1:{port}"):
        ServerRendezvous("127.0.0.1", port, KEY).store(2, 5.0)

    gone = server.rendezvous.store(2, 5.0)
    gone._connection.close()
    with pytest.raises(dist.DistStoreError, match="does not answer any more"):
        gone.set("a", "b")


def test_nobody_is_let_in_after_it_was_closed(server):
    server.rendezvous.store(2, 5.0)
    server.close()
    with pytest.raises(OSError):
        Client((server.rendezvous.host, server.rendezvous.port), authkey=KEY)


def test_the_key_is_not_shown(server):
    assert "kkk" not in repr(server.rendezvous)


def _rank(rank, meeting, answers):
    """Make groups as a run does: of all, of some, and a mesh."""
    store = meeting.store(3, 60.0)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=3, store=store, timeout=limit)
    some = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    sums = []
    for group in (None, mesh.get_group("dp"), *some):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            value = torch.tensor([10.0**rank])
            dist.all_reduce(value, group=group)
            sums.append(value.item())
    answers.put((rank, sums))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["file", "server"])
def test_ranks_make_their_groups_by_it(kind, server, tmp_path):
    meeting = FileRendezvous(str(tmp_path / "store")) if kind == "file" else server.rendezvous
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, meeting, answers)) for rank in range(3)]
    os.environ["OMP_NUM_THREADS"] = "1"
    for process in ranks:
        process.start()
    sums = dict(answers.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    # 1 + 10 + 100 of all, 1 + 10 of ranks 0 and 1, 10 + 100 of ranks 1 and 2
    assert sums == {0: [111, 111, 11], 1: [111, 111, 11, 110], 2: [111, 111, 110]}
