"""Messages as objects of the runtime's store."""

from __future__ import annotations

from helpers.transport_jobs import link, message

from hybridflow.backends.inline.runtime import InlineStore
from hybridflow.backends.transports.store import ObjectStore


def test_it_serves_pools_of_their_own_that_have_a_store():
    assert ObjectStore.problem(link(0, grouped=False, store=InlineStore())) is None
    assert "no object store" in str(ObjectStore.problem(link(0, grouped=False)))
    one_group = link(0, grouped=True, store=InlineStore())
    assert "ranks of one process group have collective" in str(ObjectStore.problem(one_group))


def test_every_receiver_gets_a_message_of_its_own():
    store = InlineStore()
    sender, *receivers = (ObjectStore(link(i, grouped=False, store=store)) for i in range(3))
    sent = message(3, 1, 4)
    tickets = sender.post({1: sent, 2: sent})
    first, second = (receiver.get(tickets[at], 3) for at, receiver in enumerate(receivers, 1))
    assert first.tolist() == [3, 1, 4]
    first.fill_(9)
    assert second.tolist() == [3, 1, 4]
