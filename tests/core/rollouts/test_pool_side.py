"""Two pools of two ranks: messages left on one side, fetched on the other."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import CountingStore
from helpers.brute import layout
from helpers.reshard_jobs import storage, value
from helpers.tiny_roles import sync

from hybridflow.core.contracts.transport import Transport
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.plugins import Descriptor, Registry
from hybridflow.core.resharding.exchange import ShardReader
from hybridflow.core.rollouts import transports
from hybridflow.core.rollouts.pool_side import PoolSide
from hybridflow.core.values.weights import Box

CPU = torch.device("cpu")
SHAPES = {"a": (128, 8), "b": (3,)}
BY_ROWS = {
    rank: {"a": (Box((64 * rank, 0), (64 * rank + 64, 8)),), "b": (Box.full((3,)),)}
    for rank in range(2)
}
BY_COLUMNS = {
    rank: {"a": (Box((0, 4 * rank - 8), (128, 4 * rank - 4)),), "b": (Box.full((3,)),)}
    for rank in (2, 3)
}
SOURCE, TARGET = layout(SHAPES, BY_ROWS), layout(SHAPES, BY_COLUMNS, torch.bfloat16)
BUCKET_MB = 0.0011
"""So small that `a` comes in several rounds."""


def sides(spec) -> list[PoolSide]:
    store, nodes = CountingStore(), ["here"] * 4
    return [PoolSide(SOURCE, TARGET, rank, CPU, nodes, store, spec) for rank in range(4)]


@pytest.mark.parametrize("transport", ["auto", "store", "disk"])
def test_round_by_round_the_other_pool_gets_its_boxes(transport, tmp_path):
    every = sides(sync(transport, str(tmp_path), bucket_mb=BUCKET_MB))
    sources = [ShardReader(storage(SOURCE, rank, True)) for rank in range(2)]
    targets = {rank: storage(TARGET, rank, False) for rank in (2, 3)}
    moved = dict.fromkeys(targets, 0)
    rounds = len(every[0].exchange.rounds)
    assert rounds > 2
    for at in range(rounds):
        posted = [every[rank].post(at, sources[rank].read) for rank in range(2)]
        tickets = {(rank, to): ticket for rank in range(2) for to, ticket in posted[rank].items()}
        for rank, held in targets.items():
            into = ShardReader(held)

            def write(name, box, values, into=into):
                into.read(name, box).copy_(values)

            moved[rank] += every[rank].fetch(at, tickets, write)
    assert moved == {
        2: 128 * 4 * 2 + 3 * 2,
        3: 128 * 4 * 2 + 3 * 2,
    }  # half of `a`, and `b`, in bf16
    for held in targets.values():
        for name, box, tensor in held:
            expected = value(name, SHAPES[name], torch.float32)[box.slices()].bfloat16()
            assert torch.equal(tensor, expected)
    for side in every:
        side.mailbox.forget()


def test_messages_of_the_last_two_rounds_are_kept(tmp_path):
    side, *_ = sides(sync("disk", str(tmp_path), bucket_mb=BUCKET_MB))
    read, left = ShardReader(storage(SOURCE, 0, True)).read, []
    for at in range(4):
        left.append(set(side.post(at, read).values()))
    assert {str(path) for path in tmp_path.iterdir()} == left[2] | left[3]
    side.mailbox.forget()
    assert not list(tmp_path.iterdir())


class Pipe(Transport):
    """No mailbox: both sides must meet."""

    def start(self, outgoing, incoming):
        raise NotImplementedError


def test_a_transport_that_leaves_no_messages_does_not_reach_another_pool(monkeypatch):
    theirs = Registry()
    theirs.add(Descriptor("transport", "pipe", f"{__name__}:Pipe"))
    monkeypatch.setattr(transports, "registry", lambda: theirs)
    with pytest.raises(HybridFlowError, match="the transport pipe does not reach another pool"):
        sides(sync("pipe"))
