"""How a role's weights come to its rollout engine."""

from __future__ import annotations

import attrs

from hybridflow.core.config.validators import at_least


@attrs.frozen
class SyncConfig:
    """[actor.sync]."""

    transport: str = "auto"
    """A plugin of kind "transport"; auto: the fastest that reaches all ranks."""
    bucket_mb: float = attrs.field(default=64.0, validator=at_least(0.01))
    """The most memory that a sync takes for messages on a rank, in 10^6 bytes, over all that is under way."""
    alias: bool = True
    """Keep one copy where training and rollout could share it: whole parameters of one dtype and memory order, of a role on
    one rank that is neither offloaded nor drops its engine (generation.keep)."""
    verify: bool = False
    """Compare checksums of every parameter on both sides after each sync; the first that differs is named."""
    folder: str | None = None
    """A folder that all ranks see, for the transport "disk"."""
