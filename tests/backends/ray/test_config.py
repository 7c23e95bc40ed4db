"""Where a Ray runtime's processes may start."""

from __future__ import annotations

from hybridflow.backends.ray.config import RayConfig
from hybridflow.core.contracts.runtime import runtime_settings


def test_processes_may_start_elsewhere_only_in_a_cluster_that_runs_already():
    assert not runtime_settings(RayConfig(threads=4, object_store_gb=1.0)).remote
    for address in ("auto", "ray-head:6379"):
        assert runtime_settings(RayConfig(address=address)).remote
