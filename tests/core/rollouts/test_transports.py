"""Which transport carries the weights, by name and by itself."""

from __future__ import annotations

import attrs
import pytest
import torch
from helpers.batches import CountingStore
from helpers.syncs import chosen

from hybridflow.backends.transports.disk import Disk
from hybridflow.backends.transports.shared_memory import SharedMemory
from hybridflow.backends.transports.store import ObjectStore
from hybridflow.core.contracts.transport import Link
from hybridflow.core.errors import HybridFlowError, PluginError
from hybridflow.core.rollouts.transports import automatic, connect

TWO_POOLS = Link(
    0,
    [0, 1],
    torch.device("cpu"),
    grouped=False,
    nodes={0: "here", 1: "here"},
    store=CountingStore(),
)
TWO_NODES = attrs.evolve(TWO_POOLS, nodes={0: "here", 1: "there"})


def test_within_a_group_what_needs_no_mailbox_comes_first():
    assert automatic(TWO_POOLS) == ["shared_memory", "collective", "store", "disk"]
    assert automatic(attrs.evolve(TWO_POOLS, grouped=True)) == [
        "collective",
        "shared_memory",
        "store",
        "disk",
    ]


def test_by_itself_the_first_that_reaches_all_ranks_serves():
    assert isinstance(connect(chosen(), TWO_POOLS), SharedMemory)
    assert isinstance(connect(chosen(), TWO_NODES), ObjectStore)


def test_a_transport_that_is_named_gets_its_settings(tmp_path):
    found = connect(chosen("disk", str(tmp_path)), TWO_NODES)
    assert isinstance(found, Disk)
    assert found.config.folder == str(tmp_path)
    assert found.link is TWO_NODES


def test_all_reasons_are_told_where_none_can_serve():
    with pytest.raises(HybridFlowError, match=r"no transport can move the weights") as caught:
        connect(chosen(), attrs.evolve(TWO_NODES, store=None))
    said = str(caught.value)
    for reason in (
        "shared_memory: the ranks are on 2 nodes",
        "collective: source and target are not in one process group",
        "store: the runtime gives the workers no object store",
        "disk: there is no folder that all ranks see; set sync.transport.folder",
    ):
        assert reason in said


def test_a_transport_that_is_named_is_not_replaced_by_another():
    with pytest.raises(
        HybridFlowError,
        match="collective: ",
    ):
        connect(chosen("collective"), TWO_POOLS)
    with pytest.raises(PluginError, match="shared_memory"):
        connect(chosen("shared_memry"), TWO_POOLS)
