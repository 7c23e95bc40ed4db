"""The contract of planners.

A planner places a job's models on devices, predicts the time of a step, and checks the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol as Typing

import attrs

from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.footprint import EngineRoom
from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.contracts.runtime import ResourcePool
from hybridflow.core.errors import HybridFlowError
from hybridflow.core.values.units import amount

STAGES = ("generate", "infer", "train")
"""The step stages, one after the other (arXiv:2409.19256, section 2): generation, inference
(forward passes for log-probabilities, values and scores: the paper's preparation) and training."""
EXCESS = 0.15
"""The share by which a job may exceed the memory and still start: the formulas' possible error."""
STAGE_NAMES: Mapping[str, str] = {
    "generate": "generation",
    "infer": "inference",
    "train": "training",
}
"""The step stages in words."""


# --- what a planner reads ---


class PlannableJob(Typing):
    """The part of a job (core.job.job.Job) that planners read."""

    @property
    def name(self) -> str: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def run(self) -> Any:
        """The section [run] (core.job.sections.RunSection)."""

    @property
    def placement(self) -> Any:
        """The section [placement] (core.job.sections.PlacementSection)."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def models(self) -> Mapping[str, Any]:
        """Role -> core.job.job.PlacedModel: the model, and in a placed job its placement."""

    @property
    def carried(self) -> frozenset[str]:
        """The roles whose responses to several steps are generated at once."""

    @property
    def pools(self) -> Mapping[str, ResourcePool]: ...
    @property
    def runtime(self) -> str: ...
    @property
    def device(self) -> str: ...


# --- what a planner returns ---


@attrs.frozen
class Prediction:
    """The predicted time of one step."""

    seconds: float
    """Time of the whole step, in seconds."""
    work: Mapping[tuple[str, str], float] = attrs.field(factory=dict)
    """(role, step stage) -> seconds of the role's work; step stages are those of STAGES."""


@attrs.frozen
class Line:
    """A line of an explanation."""

    text: str = ""
    style: str = ""
    """A style of the library rich, such as "bold" or "yellow"."""


@attrs.frozen
class TextTable:
    """A table of an explanation."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = Line | TextTable


@attrs.frozen
class Bar:
    """The work of a role in a step, as a bar of a timeline."""

    pool: str
    """Row of the timeline."""
    role: str
    started: float
    """Start, in seconds since the step began."""
    seconds: float
    """Duration, in seconds."""


@attrs.frozen(kw_only=True)
class Plan:
    """A placement of all models of a job."""

    # For the run
    settings: Mapping[str, Any]
    """The placement as tables of a config: `pools`, and for each role its `pool`, `layout` and
    `generation`."""
    prediction: Prediction

    # For the reader of `hybridflow plan`
    cluster: str = ""
    """The cluster that it is planned for, in a line."""
    explanation: tuple[Block, ...] = ()
    """Reasons for this placement, its bottlenecks, and the next best; for `hybridflow plan`."""
    bars: tuple[Bar, ...] = ()
    """The timeline of a step."""
    ends: tuple[float, ...] = ()
    """Ends of the step stages, in seconds since the step began."""


# --- the planner ---


@attrs.frozen
class DeviceMemory:
    """The memory of each device of a pool, in bytes; if they differ, the least."""

    total: float
    free: float
    """Bytes that are free before the run."""


@attrs.frozen(kw_only=True)
class PoolMemory:
    """The memory that a job takes on each device of a pool at its fullest moment, in bytes."""

    pool: str
    needed: float
    usable: float
    when: str
    """The moment: "while actor trains"."""
    parts: tuple[tuple[str, float], ...]
    """The summands of `needed`: (name, bytes)."""
    phases: Mapping[str, float] = attrs.field(factory=dict)
    """Moment -> the bytes needed then."""
    rooms: Mapping[str, EngineRoom] = attrs.field(factory=dict)
    """Role -> the memory that the models leave to its engine on this pool."""
    remedies: tuple[str, ...] = ()
    """If it does not fit: lines of a config with which it does; () where none were found."""

    @property
    def fits(self) -> bool:
        """Whether the usable memory is enough."""
        return self.needed <= self.usable

    @property
    def refused(self) -> bool:
        """Whether it exceeds the memory by so much that a run on GPUs does not start."""
        return self.needed > (1.0 + EXCESS) * self.usable

    @property
    def problem(self) -> str:
        """The sentence on why it does not fit: the moment, the sum, and the usable memory."""
        parts = " + ".join(f"{what} {amount(nbytes)}" for what, nbytes in self.parts)
        over = 100 * (self.needed / self.usable - 1)
        return (
            f"it needs {amount(self.needed)} per device {self.when} ({parts}), and "
            f"{amount(self.usable)} are usable: {over:.0f}% too much"
        )


class NotPlanned(HybridFlowError):
    """Raised when a planner cannot plan or check a job; the message has the reason."""


class Planner(ABC):
    """A plugin of kind "planner".

    It is used by `placement = "auto"`, `hybridflow plan` and the predictions of a run.
    """

    Config: ClassVar[type | None] = None
    """Its settings, a frozen attrs class; they are given beside its name in placement.planner.
    None: it has no settings."""

    def __init__(self, config: Any = None):
        """`config`: an instance of its Config."""
        self.config = config

    @abstractmethod
    def plan(
        self, job: PlannableJob, cluster: str, alternatives: int = 3, placed: bool = False
    ) -> Plan:
        """Return the best placement on a cluster.

        cluster: a file, or a text that the planner understands.
        alternatives: how many of the next best placements the explanation shows.
        placed: whether the job has a placement of its own, to be compared with the best one.

        Raises HybridFlowError where nothing fits, and NotPlanned.
        """

    @abstractmethod
    def predict(self, job: PlannableJob, cluster: str) -> Prediction:
        """Predict the time of a step of the job as it is placed.

        Raises NotPlanned, and HybridFlowError for a cluster that cannot be read.
        """

    @abstractmethod
    def problems(self, job: PlannableJob, cluster: str) -> list[str]:
        """Return the reasons why the job, as it is placed, does not fit the cluster; [] if it does.

        Raises NotPlanned.
        """

    def memory(self, job: PlannableJob, devices: Mapping[str, DeviceMemory]) -> list[PoolMemory]:
        """Return the memory that the placed job takes on the devices of each pool.

        devices: pool -> its devices' memory, as measured before anything was built. Raises
        NotPlanned where the planner has no formulas for it.
        """
        raise NotPlanned(f"the planner {type(self).__name__} has no formulas of memory")

    def read_early(self, job: PlannableJob, trained: Collection[str]) -> Sequence[str]:
        """Return the calls of a step whose results the algorithm reads while it writes the step.

        Of these only calls in pools in which something is trained: where steps are generated ahead
        (run.max_staleness), such a read waits for the step's turn. trained: the roles in these
        pools, with "compute" and "data". Raises NotPlanned where the planner cannot tell.
        """
        raise NotPlanned(f"the planner {type(self).__name__} does not follow steps")

    def scaling(self, job: PlannableJob, cluster: str, devices: Sequence[int]) -> tuple[Block, ...]:
        """Return the best placements on other numbers of devices, for `hybridflow plan --what-if`.

        Raises NotPlanned where the planner cannot tell.
        """
        raise NotPlanned(f"the planner {type(self).__name__} has no what-if")

    def rehearse(self, job: PlannableJob, cluster: str) -> Iterator[Block]:
        """Yield the best placement's memory, measured by the backends' code without devices.

        Blocks are yielded while the work goes on. Raises NotPlanned where the planner cannot tell.
        """
        raise NotPlanned(f"the planner {type(self).__name__} has no dry run")
