"""Messages that wait where receivers fetch them."""

from __future__ import annotations

import pytest
from helpers.transport_jobs import link, message

from hybridflow.core.contracts.transport import Mailbox, Transport


class Shelf(Mailbox):
    """Keeps copies on a shelf that all ranks share; a ticket is a number."""

    def __init__(self, link, shelf):
        super().__init__(link)
        self.shelf = shelf
        self.puts = 0

    def put(self, message):
        self.puts += 1
        ticket = (self.link.rank, self.puts)
        self.shelf[ticket] = message.clone()
        return ticket

    def get(self, ticket, nbytes):
        found = self.shelf[ticket]
        assert len(found) == nbytes
        return found.to(self.link.device)

    def drop(self, ticket):
        del self.shelf[ticket]


def test_ranks_are_on_one_node_where_no_two_names_differ():
    assert link(0).one_node
    assert link(0, nodes={}).one_node
    assert not link(0, nodes={0: "here", 1: "there", 2: "here"}).one_node


def test_a_message_to_several_receivers_is_left_once():
    box = Shelf(link(0), {})
    shared = message(1, 2)
    tickets = box.post({1: shared, 2: shared})
    assert tickets[1] == tickets[2]
    assert box.puts == 1
    apart = box.post({1: message(1, 2), 2: message(1, 2)})
    assert apart[1] != apart[2]
    assert box.puts == 3


def test_messages_are_forgotten_round_by_round_the_oldest_first():
    shelf = {}
    box = Shelf(link(0), shelf)
    rounds = [box.post({1: message(number)}) for number in range(4)]
    box.forget(keep=2)
    assert set(shelf) == {rounds[2][1], rounds[3][1]}
    box.forget(keep=2)
    assert len(shelf) == 2
    box.close()
    assert shelf == {}
    box.close()


def test_a_round_of_a_rank_alone_brings_what_comes_and_keeps_two_rounds():
    shelf = {}
    box = Shelf(link(0, nodes={}), shelf)
    for _ in range(4):
        assert box.start({1: message(7)}, {}).wait() == {}
    assert len(shelf) == 2


def test_a_transport_serves_any_ranks_unless_it_says_why_not():
    assert Transport.problem(link(0)) is None
    assert Shelf.crosses_pools and not Transport.crosses_pools
    with pytest.raises(TypeError, match="start"):
        Transport(link(0))
