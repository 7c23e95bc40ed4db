"""The contract of planners: where a job's models go, how long a step takes there, and whether it fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol as Typing

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import HybridFlowError

STAGES = ("generate", "infer", "train")
"""A step's stages, one after the other (arXiv:2409.19256, section 2): generation, preparation, training."""
STAGE_NAMES: Mapping[str, str] = {
    "generate": "generation",
    "infer": "inference",
    "train": "training",
}
"""For readers."""


class PlannableJob(Typing):
    """What a planner reads of a job (core.job.job.Job)."""

    @property
    def name(self) -> str: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def models(self) -> Mapping[str, Any]:
        """Role -> core.job.job.PlacedModel: what runs, and for a job that is placed also where."""

    @property
    def pools(self) -> Mapping[str, ResourcePool]: ...
    @property
    def runtime(self) -> str: ...
    @property
    def device(self) -> str: ...


@attrs.frozen
class Prediction:
    """Seconds of one step."""

    seconds: float
    work: Mapping[tuple[str, str], float] = attrs.field(factory=dict)
    """(role, stage) -> seconds of its work; stages are those of STAGES."""


@attrs.frozen
class Line:
    """A line of an explanation."""

    text: str = ""
    style: str = ""
    """As rich has them: "bold", "yellow"."""


@attrs.frozen
class Table:
    """A table of an explanation."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = Line | Table


@attrs.frozen
class Bar:
    """A role's work in a step, for a picture."""

    pool: str
    """Its row."""
    role: str
    started: float
    """Seconds since the step began."""
    seconds: float


@attrs.frozen(kw_only=True)
class Plan:
    """A placement of all models of a job."""

    settings: Mapping[str, Any]
    """Tables of a config: `pools`, and for each role its `pool`, `layout` and `generation`."""
    prediction: Prediction
    cluster: str = ""
    """What it is planned for, in a line."""
    explanation: tuple[Block, ...] = ()
    """Why this one, what limits it, the next best; for `hybridflow plan`."""
    bars: tuple[Bar, ...] = ()
    ends: tuple[float, ...] = ()
    """When the stages end, in seconds since the step began."""


class NotPlanned(HybridFlowError):
    """A planner can say nothing of a job as it is; says why."""


class Planner(ABC):
    """A plugin of kind "planner": `placement = "auto"`, `hybridflow plan` and a run's predictions ask it."""

    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they stand beside its name in placement.planner. None: it has none."""

    def __init__(self, config: Any = None):
        """`config`: an instance of its Config."""
        self.config = config

    @abstractmethod
    def plan(
        self, job: PlannableJob, cluster: str, alternatives: int = 3, placed: bool = False
    ) -> Plan:
        """The best placement on a cluster (a file, or a text that the planner understands), beside `alternatives` others.

        `placed`: the job has a placement of its own, to be compared with it. Raises HybridFlowError where nothing fits,
        and NotPlanned.
        """

    @abstractmethod
    def predict(self, job: PlannableJob, cluster: str) -> Prediction:
        """A step of the job as it is placed. Raises NotPlanned; HybridFlowError for a cluster that cannot be read."""

    @abstractmethod
    def problems(self, job: PlannableJob, cluster: str) -> list[str]:
        """Why the job, as it is placed, does not fit the cluster. Raises NotPlanned."""

    def scaling(self, job: PlannableJob, cluster: str, devices: Sequence[int]) -> tuple[Block, ...]:
        """The best placement on other numbers of devices, as `hybridflow plan --what-if` prints it."""
        raise NotPlanned(f"the planner {type(self).__name__} has no what-if")
