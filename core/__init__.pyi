"""What `hybridflow.core` has at its top."""

from .contracts.algorithm import Algorithm as Algorithm
from .contracts.capabilities import (
    CommandCapabilities as CommandCapabilities,
    EngineCapabilities as EngineCapabilities,
    RuntimeCapabilities as RuntimeCapabilities,
    TrainingCapabilities as TrainingCapabilities,
    TransportCapabilities as TransportCapabilities,
)
from .contracts.command import Command as Command
from .contracts.data_source import DataSource as DataSource
from .contracts.environment import Answer as Answer, Environment as Environment
from .contracts.footprint import (
    CollectiveCost as CollectiveCost,
    EngineLimits as EngineLimits,
    Execution as Execution,
    Footprint as Footprint,
    Phase as Phase,
)
from .contracts.loss import Counts as Counts, Loss as Loss, Term as Term
from .contracts.observer import Observer as Observer, Span as Span
from .contracts.planner import Plan as Plan, Planner as Planner, Prediction as Prediction
from .contracts.protocol import Protocol as Protocol, TransferProtocol as TransferProtocol
from .contracts.reward import Reward as Reward, RewardSample as RewardSample
from .contracts.role import Role as Role
from .contracts.rollout import (
    Completion as Completion,
    EngineSettings as EngineSettings,
    Request as Request,
    RolloutEngine as RolloutEngine,
    SamplingParams as SamplingParams,
)
from .contracts.runtime import (
    ResourcePool as ResourcePool,
    Runtime as Runtime,
    RuntimeSettings as RuntimeSettings,
)
from .contracts.step import StepContext as StepContext
from .contracts.tracker import Tracker as Tracker
from .contracts.training import (
    MicroBatch as MicroBatch,
    OptimizerConfig as OptimizerConfig,
    Packing as Packing,
    TrainingBackend as TrainingBackend,
    TrainingSettings as TrainingSettings,
)
from .contracts.transport import Transport as Transport
from .contracts.worker import RankContext as RankContext, Worker as Worker, register as register
from .errors import HybridFlowError as HybridFlowError
from .groups.group import Pool as Pool, WorkerGroup as WorkerGroup
from .resharding.plan import ReshardPlan as ReshardPlan, plan_reshard as plan_reshard
from .values.batch import Batch as Batch
from .values.columns import Column as Column, tokens as tokens
from .values.metrics import Metrics as Metrics
from .values.model import ModelSpec as ModelSpec
from .values.model_shape import ModelShape as ModelShape, ModelSize as ModelSize
from .values.parallel import (
    GenerationLayout as GenerationLayout,
    ParallelLayout as ParallelLayout,
    generation_layout as generation_layout,
)
from .values.weights import Box as Box, Param as Param, WeightLayout as WeightLayout
