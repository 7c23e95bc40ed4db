"""How weights are synced, as a job says it."""

from __future__ import annotations

from typing import Any

from hybridflow.backends.transports.disk import DiskConfig
from hybridflow.core.job.job import SyncSpec


def sync(transport: str = "auto", folder: str | None = None, **settings: Any) -> SyncSpec:
    """With a transport by name; `folder` is for the one that needs it."""
    return SyncSpec(transport, transport_config(transport, folder), **settings)


def transport_config(transport: str, folder: str | None) -> DiskConfig | None:
    return DiskConfig(folder) if transport == "disk" and folder is not None else None
