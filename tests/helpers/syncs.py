"""How weights are synced, as a job says it."""

from __future__ import annotations

from typing import Any

import attrs

from hybridflow.backends.transports.disk import DiskConfig
from hybridflow.core.job.job import SyncSpec
from hybridflow.core.job.sections import SyncConfig


def sync(transport: str = "auto", folder: str | None = None, **settings: Any) -> SyncSpec:
    """With a transport by name; `folder` is for the one that needs it. Buckets may be tiny."""
    with attrs.validators.disabled():
        config = SyncConfig(**settings)
    return SyncSpec(transport, transport_config(transport, folder), config)


def transport_config(transport: str, folder: str | None) -> DiskConfig | None:
    return DiskConfig(folder) if transport == "disk" and folder is not None else None
