"""Configuration of the Ray runtime."""

from __future__ import annotations

import attrs

from hybridflow.core.contracts.runtime import RuntimeSettings


@attrs.frozen
class RayConfig(RuntimeSettings):
    """A local Ray by itself, or an existing cluster by its address."""

    address: str | None = None
    """Address of a running cluster ("auto", "ray-head:6379"); none: a local Ray is started, and ended with the run."""
    threads: int = attrs.field(default=1)
    """OMP_NUM_THREADS of each worker process."""
    object_store_gb: float | None = None
    """Size of a local Ray's object store, in GB; none: Ray's own choice (30% of memory)."""
    dashboard: bool = False
    """Start a local Ray's dashboard, bound to localhost."""
    start_timeout_s: float = 300.0
    """Seconds that a pool's processes may take to be placed and to join their process group."""
    temp_dir: str | None = None
    """Ray's folder for sockets and logs; none: Ray's own choice (/tmp/ray)."""

    @property
    def remote(self) -> bool:  # type: ignore[override]
        """Whether processes may start elsewhere: in a cluster that runs already."""
        return self.address is not None
