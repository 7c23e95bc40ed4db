"""Settings of the trackers, which can be read where the trackers' packages are missing."""

from __future__ import annotations

from typing import Literal

import attrs

from hybridflow.core.validators import non_negative
from hybridflow.kit.tracking import ServiceConfig


@attrs.frozen
class TensorBoardConfig:
    """Settings of the tracker `tensorboard`."""

    samples_every: int = attrs.field(default=10, validator=non_negative)
    """Steps between two tables of training samples; those of validations are all written. 0: no
    tables."""


@attrs.frozen
class WandbConfig(ServiceConfig):
    """Settings of the tracker `wandb`."""

    entity: str | None = None
    """The user or team; by default that of the login."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: into `wandb` in the run's folder, for `wandb sync`. By default as WANDB_MODE
    says."""


@attrs.frozen
class MLflowConfig(ServiceConfig):
    """Settings of the tracker `mlflow`."""

    uri: str | None = None
    """Where runs are kept: a server's address, or "sqlite:///FILE". By default as
    MLFLOW_TRACKING_URI says, and else mlflow.db in the folder that the run is started from."""


@attrs.frozen
class TrackioConfig(ServiceConfig):
    """Settings of the tracker `trackio`."""

    space_id: str | None = None
    """The Hugging Face Space that the run is sent to. By default it stays on this machine, in
    TRACKIO_DIR."""


@attrs.frozen
class SwanLabConfig(ServiceConfig):
    """Settings of the tracker `swanlab`."""

    workspace: str | None = None
    """The user or organisation; by default that of the login."""
    mode: Literal["online", "local", "offline", "disabled"] | None = None
    """offline: into `swanlab` in the run's folder, for `swanlab sync`. By default as SWANLAB_MODE
    says."""
