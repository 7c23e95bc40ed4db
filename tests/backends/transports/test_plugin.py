"""The weight transports that hybridflow brings."""

from __future__ import annotations

from helpers.brought import check_brought

from hybridflow.backends.transports import plugin
from hybridflow.backends.transports.collective import Collective
from hybridflow.backends.transports.disk import Disk
from hybridflow.backends.transports.shared_memory import SharedMemory
from hybridflow.backends.transports.store import ObjectStore


def test_four_transports_in_the_order_in_which_auto_tries_them():
    """The disk comes last: it is slow, and works wherever nothing else does."""
    check_brought(
        plugin, shared_memory=SharedMemory, collective=Collective, store=ObjectStore, disk=Disk
    )
