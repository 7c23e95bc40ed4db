"""Configuration of the Ray runtime."""

from __future__ import annotations

import attrs

from hybridflow.core.contracts.runtime import RuntimeSettings


@attrs.frozen
class RayConfig(RuntimeSettings):
    """Settings of the Ray of a run: a local one of its own, or a running cluster at an address."""

    address: str | None = None
    """Address of a running cluster ("auto", "ray-head:6379"). Without one, a local Ray is started,
    and ended with the run."""
    threads: int = attrs.field(default=1)
    """OMP_NUM_THREADS and MKL_NUM_THREADS of each worker process."""
    spin: bool = False
    """Whether these threads spin for milliseconds while they wait for each other. By default they
    spin briefly and then sleep, which is several times faster beside other work, and an eighth
    slower in small steps without any."""
    object_store_gb: float | None = None
    """Size of a local Ray's object store, in GiB. Default: Ray's own choice (30% of memory)."""
    dashboard: bool = False
    """Whether a local Ray starts its dashboard, bound to localhost."""
    start_timeout_s: float = 300.0
    """Seconds that the processes of a pool may take to be placed, and again to join their process
    group."""
    collective_timeout_s: float = attrs.field(default=1800.0, validator=attrs.validators.gt(0))
    """Seconds that a rank waits for the others in a collective call. Ranks are not synchronised
    while they generate and score, so it must be longer than these take on the slowest rank."""
    temp_dir: str | None = None
    """Folder of a local Ray for sockets and logs. Default: hybridflow-UID/ray in the system's
    temporary folder, which other users cannot enter."""

    @property
    def remote(self) -> bool:  # type: ignore[override]
        """Whether processes may start on other machines: true with an address."""
        return self.address is not None
