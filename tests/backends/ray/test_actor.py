"""The actor that hosts one rank, and the store that it hands out."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ray")

import ray

from hybridflow.backends.ray.actor import HostActor, RayStore, unpacked
from hybridflow.core.groups.host import read_reply, write_call
from hybridflow.core.groups.wire import Encoder


def test_a_reply_is_a_blob_alone_or_a_blob_with_handles_and_whether_it_failed():
    assert unpacked(b"blob") == (b"blob", (), False)
    assert unpacked((b"blob", ["handle"], True)) == (b"blob", ["handle"], True)


def test_a_block_is_read_from_the_store_without_a_copy(ray_cluster):
    store = RayStore()
    handle = store.put([np.arange(200_000), np.zeros(3)])
    numbers, zeros = store.get(handle)
    assert numbers[-1] == 199_999
    assert zeros.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1


def test_ranks_on_several_machines_meet_at_the_address_that_ray_has_for_the_first_ones_node(
    ray_cluster, monkeypatch
):
    # A stock Debian has 127.0.1.1 for its own name, which no other machine reaches.
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    actor = HostActor.__ray_actor_class__("main", 0, [0, 1], {}, [])
    try:
        meeting = actor.serve(b"key")
        assert meeting.host in [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    finally:
        actor.host.leave()


def test_calls_that_go_well_answer_with_bytes_and_others_say_what_failed(ray_cluster):
    actor = HostActor.options(num_cpus=0).remote("main", 3, range(4), {}, [])
    assert ray.get(actor.ping.remote()) is None
    encoder = Encoder(RayStore())
    closes = write_call("nobody", "__delete__", True, encoder.dumps(((), {})))
    works = write_call("nobody", "work", True, encoder.dumps(((), {})))
    good, bad = ray.get([actor.call.remote(closes), actor.call.remote(works)])
    ray.kill(actor)
    assert isinstance(good, bytes)
    assert read_reply(*unpacked(good), RayStore()).error is None
    error = read_reply(*unpacked(bad), RayStore()).error
    assert (error.role, error.phase, error.rank) == ("nobody", "work", 3)
    assert "there is no worker of role 'nobody' here" in str(error)
