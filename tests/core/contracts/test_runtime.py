"""Pools, the bytes through the controller, and runtimes that say nothing of themselves."""

from __future__ import annotations

from hybridflow.core.contracts.runtime import (
    ResourcePool,
    RuntimeSettings,
    Traffic,
    runtime_settings,
)


def test_a_pool_has_a_process_for_each_device_of_each_node():
    assert ResourcePool("all").world == 1
    assert ResourcePool("all", (8, 4)).world == 12


def test_traffic_is_counted_since_it_was_last_taken():
    traffic = Traffic()
    traffic.sent += 3
    traffic.received += 4
    traffic.fetched += 5
    assert traffic.total == 12
    assert traffic.take() == {"sent": 3, "received": 4, "fetched": 5}
    assert traffic.total == 0
    assert traffic.take() == {"sent": 0, "received": 0, "fetched": 0}


def test_a_config_that_is_no_runtime_settings_stays_on_this_machine():
    class Far(RuntimeSettings):
        remote = True

    far = Far()
    assert runtime_settings(far) is far
    for config in (None, {"remote": True}):
        assert not runtime_settings(config).remote
